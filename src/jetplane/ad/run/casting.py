"""Autocast around a step is meant for the program, not for the step's own arithmetic.

A step runs with autocast off, and each call of the closure in it as it was around the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

__all__ = ["Casts", "casts_around", "uncast"]


class Casts(NamedTuple):
    """How autocast is set: by kind of device, the dtype that it casts to."""

    dtypes: tuple[tuple[str, torch.dtype], ...]
    cached: bool

    def around(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """The closure, which runs with autocast set like this."""
        return partial(_cast, self.dtypes, self.cached, closure) if self.dtypes else closure


def casts_around(device: torch.device) -> Casts:
    """How autocast is set now, for this device and for the CPU."""
    kinds = [kind for kind in dict.fromkeys(("cpu", device.type)) if torch.is_autocast_enabled(kind)]
    found = tuple([(kind, torch.get_autocast_dtype(kind)) for kind in kinds])
    return Casts(found, torch.is_autocast_cache_enabled())


def uncast(around: Casts) -> contextlib.AbstractContextManager[None]:
    """Autocast off. What it keeps of casts is forgotten at the end, for the parameters have moved."""
    return _off(around.dtypes) if around.dtypes else contextlib.nullcontext()


@contextlib.contextmanager
def _off(dtypes: tuple[tuple[str, torch.dtype], ...]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind, _ in dtypes:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
    torch.clear_autocast_cache()


def _cast(
    dtypes: tuple[tuple[str, torch.dtype], ...], cached: bool, closure: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if not dtypes:
        return closure(*args, **kwargs)
    (kind, dtype), *rest = dtypes
    with torch.autocast(kind, dtype=dtype, cache_enabled=cached):
        return _cast(tuple(rest), cached, closure, *args, **kwargs)
