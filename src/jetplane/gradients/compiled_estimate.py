"""Forward gradients as compiled graphs: what is compiled for which program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.run.casting import casts_around
from ..compiler.capture import Compiled, Graph, Run, compiled
from ..compiler.in_parts import InParts
from ..compiler.programs import Programs
from ..compiler.replayed import Many, many_times
from ..compiler.several import Several
from ..errors import CaptureFailed
from ..parallel.shards import Meeting
from .passes.sample_parts import Division
from .traced_estimate import Part, TracedEstimate

__all__ = ["CompiledEstimate", "places_of", "refuse_asking"]


class _Call(NamedTuple):
    """One call, on both sides of the program between them."""

    several: Several
    division: Division | None  # where the batch goes in parts
    ours: list[Tensor]  # .grad of the parameters, seed and step
    losses: list[Tensor]  # what the graph finds: the mean losses (n,)
    meeting: Meeting | None  # of the processes that make it together


class CompiledEstimate:
    """The calls of one estimate as graphs, one for each program and signature."""

    def __init__(
        self, trace: Callable[[Graph, Sequence[Tensor], Division | None], TracedEstimate], parameters: list[Tensor]
    ) -> None:
        self._trace, self._parameters = trace, parameters
        self._programs = Programs(self._build)
        self._found: list[Tensor] = []  # gradients of this process, which are not yet those of all
        self._call: _Call

    def __call__(
        self,
        func: Callable[..., Any],
        batches: tuple[Any, ...],
        count: int,
        numbers: list[Tensor],
        has_aux: bool,
        division: Division | None = None,
        meeting: Meeting | None = None,
    ) -> tuple[Tensor, Any] | None:
        """Add an estimate for each entry of the batches to ``.grad``: the mean losses (n,), and aux.

        None where the program has to be run as it is, and nothing was done. ``numbers`` are seed and step; the latter
        counts on.
        """
        casts = casts_around(self._parameters[0].device)
        several = Several.of(batches, count, None if division is None else division.part)
        grads = [*map(_grad_of, self._parameters)] if meeting is None else self._apart()
        self._call = _Call(several, division, [*grads, *numbers], [], meeting)
        try:
            returned = self._programs.call(func, casts.around, (casts, division), several.first, has_aux)
        finally:
            call = self._call
            del self._call
        if returned is None:
            return None
        return call.losses[0], _torch.pytree.tree_map(several.every, returned[1]) if has_aux else None

    def _apart(self) -> list[Tensor]:
        """Where the gradients of this process are added up, to be exchanged."""
        if not self._found:
            self._found = [torch.zeros_like(parameter, requires_grad=False) for parameter in self._parameters]
        return self._found

    def _build(self, graph: Graph, inputs: Sequence[Tensor]) -> Run:
        refuse_asking(graph)
        traced, many = self._compiled(graph, inputs)

        def call(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            nonlocal traced, many
            several = self._call.several
            if traced.is_stale(inputs, several.count):
                traced, many = self._compiled(graph, inputs)
            traced.stand(self._call.meeting)
            every = [*inputs, *traced.tensors, *traced.sums, *self._call.ours]
            *outputs, losses = many(every, several.fed(inputs), several.count)
            self._call.losses.append(losses)
            return several.keep(outputs)

        return call

    def _compiled(self, graph: Graph, inputs: Sequence[Tensor]) -> tuple[TracedEstimate, Many]:
        traced = self._trace(graph, inputs, self._call.division)
        every, body = [*inputs, *traced.tensors, *traced.sums, *self._call.ours], _EstimateBody(traced, len(inputs))
        if traced.division is None:
            return traced, many_times(body.compiled(body.whole, every), every)
        fed, alone = self._call.several.fed(inputs), self._call.meeting is None
        exchange = None if alone else self._exchange(traced, len(inputs))
        return traced, many_times(body.in_parts(every, places_of(inputs, fed), exchange), every, alone=alone)

    def _exchange(self, traced: TracedEstimate, places: int) -> Callable[[Sequence[Tensor], Tensor], Tensor]:
        """What comes between the graphs of a call that processes make together: ``.grad`` gets the sum."""
        first = places + len(traced.tensors)

        def exchange(tensors: Sequence[Tensor], loss: Tensor) -> Tensor:
            assert self._call.meeting is not None
            sums = tensors[first : first + len(traced.sums)]
            mean = traced.met(self._call.meeting, sums, self._found, loss)
            for parameter, total, place in zip(self._parameters, self._found, traced.places, strict=True):
                if place is not None:
                    _grad_of(parameter).add_(total)
                total.zero_()
            return mean

        return exchange


class _EstimateBody:
    """What is compiled of a call, over the program's inputs, the estimate's tensors, its sums, .grad, seed and step."""

    def __init__(self, traced: TracedEstimate, places: int) -> None:
        self._traced = traced
        self._starts = places, places + len(traced.tensors), places + len(traced.tensors) + len(traced.sums)

    def compiled(self, body: Callable[[list[Tensor]], list[Tensor]], every: Sequence[Tensor]) -> Compiled:
        return compiled(body, every, None if self._traced.random else body, writes=True)

    def in_parts(
        self,
        every: Sequence[Tensor],
        places: Sequence[int],
        exchange: Callable[[Sequence[Tensor], Tensor], Tensor] | None,
    ) -> Compiled:
        offsets = self._traced.offsets
        part = self.compiled(self.part, [*every, offsets[0]])
        end = self.compiled(self.end, [*every, self._traced.loss_like])
        return InParts(part, end, places, offsets, self._traced.aux, exchange).compiled

    def whole(self, tensors: list[Tensor]) -> list[Tensor]:
        outputs = self._estimated(tensors, None)
        tensors[-1].add_(1)
        return outputs

    def part(self, tensors: list[Tensor]) -> list[Tensor]:
        *tensors, offset = tensors
        return self._estimated(tensors, Part(offset, self._split(tensors)[2]))

    def end(self, tensors: list[Tensor]) -> list[Tensor]:
        *tensors, loss = tensors
        _, learned, sums, _ = self._split(tensors)
        self._traced.settle(learned, sums)
        tensors[-1].add_(1)
        return [loss.clone()]

    def _estimated(self, tensors: list[Tensor], part: Part | None) -> list[Tensor]:
        given, learned, _, (*grads, seed, step) = self._split(tensors)
        found = self._traced(given, learned, seed, step, self._traced.replay(given), part)
        for grad, more in zip(grads, found.grads, strict=True):
            if more is not None:
                grad.add_(more)
        return [*found.outputs, found.loss]

    def _split(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        own, sums, ours = self._starts
        return tensors[:own], tensors[own:sums], tensors[sums:ours], tensors[ours:]


def places_of(inputs: Sequence[Tensor], fed: Mapping[int, Tensor]) -> list[int]:
    """The places of the inputs that have a part of what batches have."""
    return [place for place, batch in fed.items() if batch.ndim > 1 and batch.shape[1:] != inputs[place].shape]


def refuse_asking(graph: Graph) -> None:
    """Raise where a program waits for the value of a tensor, which a graph of several steps cannot."""
    if graph.asking is not None:
        raise CaptureFailed(f"it asks for the value of a tensor, and waits for it ({graph.asking})")


def _grad_of(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, requires_grad=False)
    return parameter.grad
