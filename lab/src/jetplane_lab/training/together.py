"""Several runs at once on one device, step by step: small models leave a GPU idle between their steps."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from . import memory
from .metrics import Summary
from .stopping import stop_signals
from .trainer import Trainer

__all__ = ["train_together"]


def train_together(runs: Sequence[Trainer]) -> list[Summary]:
    """Train all ``runs`` to their ends, a step of each in turn, and on CUDA each on a stream of its own.

    Each is, bit for bit, what it would be by itself: they share nothing but data that is only read. Their seconds and
    their memory are those of all together, which ``Metrics.together`` says. Signals stop all of them after
    the epochs that run.
    """
    runs = list(runs)
    devices = {run.device for run in runs}
    if len(devices) > 1:
        raise ValueError(f"the runs are on {', '.join(sorted(map(str, devices)))}; expected one device.")
    if runs:
        memory.require([(run.demand, run.config.tangents) for run in runs], runs[0].device)
    with stop_signals() as stop:
        for run in runs:
            run.stop, run.together = stop, len(runs)
        lanes = [(run.work(), _stream(run.device)) for run in runs]
        try:
            while lanes:
                lanes = [lane for lane in lanes if _advance(*lane)]
        finally:
            for work, _ in lanes:
                work.close()
    return [run.summary for run in runs if run.summary is not None]


def _advance(work: Any, stream: Any) -> bool:
    """One step of a run; whether there is more to do."""
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        try:
            next(work)
        except StopIteration:
            return False
    return True


def _stream(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # data and parameters were put there
    return stream
