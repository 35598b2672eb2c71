"""Compiled steps replayed as CUDA graphs: several steps to a launch, and no waiting between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from functools import partial

import torch
from torch import Tensor

from ..ad import _torch
from .capture import Compiled, Run
from .cuda_graphs import WARM_UPS, Pool, Recording

__all__ = ["Many", "Pool", "Replayed", "many_times", "repeated"]

log = logging.getLogger("jetplane")

Many = Callable[[Sequence[Tensor], "Batches", int], list[Tensor]]  # inputs, batches, and how many calls

Batches = dict[int, Tensor]  # by place among the inputs: (n, ...), one entry for each of n steps

_MOST = 10  # steps of one graph: of a short step, the time from one graph to the next is a tenth


def repeated(run: Run, inputs: Sequence[Tensor], batches: Batches, count: int) -> list[Tensor]:
    """The outputs (n, ...) of n calls of ``run``; ``batches`` (n, ...) take the places of inputs, one entry a call."""
    outputs = []
    for number in range(count):
        now = list(inputs)
        for place, batch in batches.items():
            now[place] = batch[number]
        outputs.append(run(now))
    if count == 1:
        return [one.unsqueeze(0) for one in outputs[0]]
    return [torch.stack(list(each)) for each in zip(*outputs, strict=True)]


def many_times(run: Compiled, inputs: Sequence[Tensor], pool: Pool | None = None, alone: bool = True) -> Many:
    """``run``, as often as there are entries of batches: on CUDA as graphs, of a process that is ``alone``."""
    return Replayed(run, run.written, pool) if inputs[0].is_cuda and alone else partial(repeated, run)


class Replayed:
    """Calls ``run`` a few times as it is, and from then on replays what it launches, several steps to a graph."""

    def __init__(self, run: Run, written: Set[int] = frozenset(), pool: Pool | None = None) -> None:
        self._run, self._written = run, written
        self._pool = pool or Pool()  # the graphs run one after the other
        self._calls = 0
        self._graphs: dict[int, _Steps] = {}  # by their number of steps

    def __call__(self, inputs: Sequence[Tensor], batches: Batches, count: int) -> list[Tensor]:
        """The outputs (n, ...) of n steps, as of :func:`repeated`."""
        done, parts = 0, list[list[Tensor]]()
        while done < count:
            warm = WARM_UPS - self._calls
            ahead = min(count - done, warm if warm > 0 else _MOST)
            some = {place: batch[done : done + ahead] for place, batch in batches.items()}
            if warm > 0:
                parts.append(repeated(self._run, inputs, some, ahead))
            else:
                if ahead not in self._graphs:
                    self._graphs[ahead] = _Steps(self._run, self._written, self._pool, ahead)
                parts.append(self._graphs[ahead](inputs, some))
            self._calls += ahead
            done += ahead
        return [torch.cat(each) if len(parts) > 1 else each[0] for each in zip(*parts, strict=True)]


class _Steps(Recording):
    """A graph of a fixed number of steps, which read their batches and leave their outputs at places of their own."""

    def __init__(self, run: Run, written: Set[int], pool: Pool, count: int) -> None:
        super().__init__(run, written, pool)
        self._count = count
        self._batches: Batches = {}

    def __call__(self, inputs: Sequence[Tensor], batches: Batches) -> list[Tensor]:
        """The outputs (n, ...) of the steps."""
        if self._graph is None or batches.keys() != self._batches.keys() or self._moved(inputs, batches.keys()):
            self._record(inputs, batches)
        assert self._graph is not None
        self._fill(inputs)
        for place, batch in batches.items():
            self._batches[place].copy_(batch)
        self._graph.replay()
        return _torch.copies(self._outputs)

    def _record(self, inputs: Sequence[Tensor], batches: Batches) -> None:
        log.info("capturing %d steps as a CUDA graph", self._count)
        self._hold(inputs)
        self._batches = {place: batch.clone() for place, batch in batches.items()}
        with self._recording():
            outputs = repeated(self._run, self._inputs, self._batches, self._count)
        self._outputs = outputs
