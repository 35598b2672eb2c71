"""Times of a call: samples until there are enough of them, and their quartiles."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

__all__ = ["first_call", "sample", "summary"]

_LEAST = 2e-3  # seconds of a sample: calls shorter than that are timed several in a row
_WARM = 0.2  # seconds of warm-up at least, for clocks and caches
_MOST = 20.0  # seconds of sampling at most, once there are three samples


def first_call(call: Callable[[], Any], wait: Callable[[Any], None]) -> tuple[Any, float]:
    """The result of the first call, and its seconds, which count compilation and what is loaded late."""
    start = time.perf_counter()
    result = call()
    wait(result)
    return result, time.perf_counter() - start


def sample(
    call: Callable[[], Any], wait: Callable[[Any], None], repeats: int, seconds: float
) -> tuple[list[float], int]:
    """Seconds of a call, at least ``repeats`` samples and ``seconds`` in all; and the calls in a row of each sample.

    A sample ends when the device has finished. Short calls are queued in a row, as a training loop does.
    """
    warm = [_once(call, wait, 1) for _ in range(2)]
    end = time.perf_counter() + max(0.0, _WARM - sum(warm))
    while time.perf_counter() < end:
        warm.append(_once(call, wait, 1))
    inner = max(1, math.ceil(_LEAST / statistics.median(warm)))
    times: list[float] = []
    total = 0.0
    while len(times) < repeats or total < seconds:
        if total > _MOST and len(times) >= 3:
            break
        took = _once(call, wait, inner)
        total += took
        times.append(took / inner)
    return times, inner


def _once(call: Callable[[], Any], wait: Callable[[Any], None], inner: int) -> float:
    start = time.perf_counter()
    for _ in range(inner - 1):
        call()
    wait(call())
    return time.perf_counter() - start


def summary(times: list[float]) -> dict[str, float | int]:
    """Median, quartiles and extremes in milliseconds.

    Example:
        >>> summary([0.001, 0.002, 0.003])["median_ms"]
        2.0
    """
    q1, median, q3 = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    values = {"median_ms": median, "q1_ms": q1, "q3_ms": q3, "min_ms": min(times), "max_ms": max(times)}
    return {**{name: round(1e3 * value, 6) for name, value in values.items()}, "samples": len(times)}
