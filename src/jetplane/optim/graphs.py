"""Compiled steps replayed as a CUDA graph: one launch a step, and no waiting between them."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set

import torch
from torch import Tensor

from ..ad.capture import Run
from ..ad.graphs import WARM_UPS, Recording

__all__ = ["Replayed", "repeated"]

log = logging.getLogger("jetplane")

Batches = dict[int, Tensor]  # by place among the inputs: (n, ...), one entry for each of n steps


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


class Replayed(Recording):
    """Calls ``run`` a few times as it is, and from then on replays what it launches.

    The graph reads entry ``cursor`` of the batches, writes entry ``cursor`` of the outputs, and moves the cursor on, so
    that the host has nothing to do between two steps but to launch the next.
    """

    def __init__(self, run: Run, written: Set[int] = frozenset()) -> None:
        super().__init__(run, written)
        self._batches: Batches = {}
        self._cursor: Tensor | None = None
        self._like: list[Tensor] = []  # the outputs of one step

    def __call__(self, inputs: Sequence[Tensor], batches: Batches, count: int) -> list[Tensor]:
        """The outputs (n, ...) of n steps, as of :func:`repeated`."""
        ahead = min(max(WARM_UPS - self._calls, 0), count)
        self._calls += count
        first: list[Tensor] = []
        if ahead:
            first = repeated(self._run, inputs, {place: batch[:ahead] for place, batch in batches.items()}, ahead)
            self._like = [one[0] for one in first]
        if ahead == count:
            return first
        rest = self._replay(inputs, {place: batch[ahead:] for place, batch in batches.items()}, count - ahead)
        return [torch.cat(both) for both in zip(first, rest, strict=True)] if first else rest

    def _replay(self, inputs: Sequence[Tensor], batches: Batches, count: int) -> list[Tensor]:
        fits = batches.keys() == self._batches.keys() and bool(self._outputs) and count <= self._outputs[0].shape[0]
        if not fits or self._moved(inputs, batches.keys()):
            self._record(inputs, batches, count)
        assert self._graph is not None and self._cursor is not None
        self._fill(inputs)
        for place, batch in batches.items():
            self._batches[place][:count].copy_(batch)
        self._cursor.zero_()
        for _ in range(count):
            self._graph.replay()
        return [output[:count].clone() for output in self._outputs]

    def _record(self, inputs: Sequence[Tensor], batches: Batches, count: int) -> None:
        log.info("capturing a step as a CUDA graph, for up to %d steps at a time", count)
        self._hold(inputs)
        self._batches = {place: torch.empty_like(batch[:count]) for place, batch in batches.items()}
        for place, batch in batches.items():  # indices must be valid ones
            self._batches[place].copy_(batch)
        cursor = self._cursor = torch.zeros(1, dtype=torch.int64, device=inputs[0].device)
        outputs = [one.new_empty((count, *one.shape)) for one in self._like]
        with self._recording():
            now = list(self._inputs)
            for place, batch in self._batches.items():
                now[place] = batch.index_select(0, cursor).squeeze(0)
            for output, value in zip(outputs, self._run(now), strict=True):
                output.index_copy_(0, cursor, value.unsqueeze(0))
            cursor.add_(1)
        self._outputs = outputs
