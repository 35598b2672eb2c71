"""A compiled step replayed as a CUDA graph: one launch a step, and no waiting."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set

import torch
from torch import Tensor

from ..ad.capture import Run

__all__ = ["Replayed", "repeated"]

log = logging.getLogger("jetplane")

Batches = dict[int, Tensor]  # by place among the inputs: (n, ...), one entry for each of n steps

_WARM_UPS = 3  # as torch advises: libraries choose their algorithms, and their workspaces, at first


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


class Replayed:
    """Calls ``run`` a few times as it is, and from then on replays what it launches.

    The graph reads entry ``cursor`` of the batches, writes entry ``cursor`` of the outputs, and moves the cursor on, so
    that the host has nothing to do between two steps but to launch the next. Other inputs are read, and written, where
    they are; one whose address changes between two calls is copied to a place of ours from then on, or, where the step
    writes it, recorded anew.
    """

    def __init__(self, run: Run, written: Set[int] = frozenset()) -> None:
        self._run = run
        self._written = written  # places among the inputs
        self._calls = 0
        # A stream of its own to capture on: matrix libraries keep a workspace for each stream, and two graphs that use
        # the same one must not run at the same time.
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []  # at the addresses that the graph reads
        self._copied: set[int] = set()
        self._batches: Batches = {}
        self._outputs: list[Tensor] = []
        self._cursor: Tensor | None = None
        self._like: list[Tensor] = []  # the outputs of one step

    def __call__(self, inputs: Sequence[Tensor], batches: Batches, count: int) -> list[Tensor]:
        """The outputs (n, ...) of n steps, as of :func:`repeated`."""
        ahead = min(max(_WARM_UPS - self._calls, 0), count)
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
        if self._graph is None or self._stale(inputs, batches, count):
            self._capture(inputs, batches, count)
        assert self._graph is not None and self._cursor is not None
        for place in self._copied:
            self._inputs[place].copy_(inputs[place])
        for place, batch in batches.items():
            self._batches[place][:count].copy_(batch)
        self._cursor.zero_()
        for _ in range(count):
            self._graph.replay()
        return [output[:count].clone() for output in self._outputs]

    def _stale(self, inputs: Sequence[Tensor], batches: Batches, count: int) -> bool:
        if batches.keys() != self._batches.keys() or count > self._capacity():
            return True
        moved = {
            place
            for place, (new, old) in enumerate(zip(inputs, self._inputs, strict=True))
            if place not in self._copied and place not in batches and new.data_ptr() != old.data_ptr()
        }
        self._copied |= moved - self._written  # a copy would take what is written away from its owner
        return bool(moved)

    def _capacity(self) -> int:
        return self._outputs[0].shape[0]

    def _capture(self, inputs: Sequence[Tensor], batches: Batches, count: int) -> None:
        """Record the launches of one step. Nothing of it runs."""
        log.info("capturing a step as a CUDA graph, for up to %d steps at a time", count)
        self._graph = None  # gives its memory back
        self._inputs = [
            tensor.detach().clone() if place in self._copied else tensor for place, tensor in enumerate(inputs)
        ]
        self._batches = {place: torch.empty_like(batch[:count]) for place, batch in batches.items()}
        for place, batch in batches.items():  # indices must be valid ones
            self._batches[place].copy_(batch)
        cursor = self._cursor = torch.zeros(1, dtype=torch.int64, device=inputs[0].device)
        self._outputs = [one.new_empty((count, *one.shape)) for one in self._like]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            now = list(self._inputs)
            for place, batch in self._batches.items():
                now[place] = batch.index_select(0, cursor).squeeze(0)
            for output, value in zip(self._outputs, self._run(now), strict=True):
                output.index_copy_(0, cursor, value.unsqueeze(0))
            cursor.add_(1)
        self._graph = graph
