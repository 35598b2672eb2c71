"""Forward gradients as compiled graphs: what is compiled for which program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.run.casting import casts_around
from ..compiler.capture import Graph, Run, compiled
from ..compiler.programs import Programs
from ..compiler.replayed import Many, many_times
from ..compiler.several import Several
from ..errors import CaptureFailed
from .traced_estimate import TracedEstimate

__all__ = ["CompiledEstimate", "refuse_asking"]


class _Call(NamedTuple):
    """One call, on both sides of the program between them."""

    several: Several
    ours: list[Tensor]  # .grad of the parameters, seed and step
    losses: list[Tensor]  # what the graph finds: the mean losses (n,)


class CompiledEstimate:
    """The calls of one estimate as graphs, one for each program and signature."""

    def __init__(self, trace: Callable[[Graph, Sequence[Tensor]], TracedEstimate], parameters: list[Tensor]) -> None:
        self._trace, self._parameters = trace, parameters
        self._programs = Programs(self._build)
        self._call: _Call

    def __call__(
        self, func: Callable[..., Any], batches: tuple[Any, ...], count: int, numbers: list[Tensor], has_aux: bool
    ) -> tuple[Tensor, Any] | None:
        """Add an estimate for each entry of the batches to ``.grad``: the mean losses (n,), and aux.

        None where the program has to be run as it is, and nothing was done. ``numbers`` are seed and step; the latter
        counts on.
        """
        casts = casts_around(self._parameters[0].device)
        several = Several.of(batches, count)
        self._call = _Call(several, [*map(_grad_of, self._parameters), *numbers], [])
        try:
            returned = self._programs.call(func, casts.around, casts, several.first, has_aux)
        finally:
            call = self._call
            del self._call
        if returned is None:
            return None
        return call.losses[0], _torch.pytree.tree_map(several.every, returned[1]) if has_aux else None

    def _build(self, graph: Graph, inputs: Sequence[Tensor]) -> Run:
        refuse_asking(graph)
        traced, many = self._compiled(graph, inputs)

        def call(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            nonlocal traced, many
            several = self._call.several
            if traced.is_stale(inputs, several.count):
                traced, many = self._compiled(graph, inputs)
            every = [*inputs, *traced.tensors, *self._call.ours]
            *outputs, losses = many(every, several.fed(inputs), several.count)
            self._call.losses.append(losses)
            return several.keep(outputs)

        return call

    def _compiled(self, graph: Graph, inputs: Sequence[Tensor]) -> tuple[TracedEstimate, Many]:
        traced, places = self._trace(graph, inputs), len(inputs)
        own = len(traced.tensors)

        def body(tensors: list[Tensor]) -> list[Tensor]:
            given, learned = tensors[:places], tensors[places : places + own]
            *grads, seed, step = tensors[places + own :]
            found = traced(given, learned, seed, step, traced.replay(given))
            for grad, part in zip(grads, found.grads, strict=True):
                if part is not None:
                    grad.add_(part)
            step.add_(1)
            return [*found.outputs, found.loss]

        every = [*inputs, *traced.tensors, *self._call.ours]
        return traced, many_times(compiled(body, every, None if traced.random else body, writes=True), every)


def refuse_asking(graph: Graph) -> None:
    """Raise where a program waits for the value of a tensor, which a graph of several steps cannot."""
    if graph.asking is not None:
        raise CaptureFailed(f"it asks for the value of a tensor, and waits for it ({graph.asking})")


def _grad_of(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, requires_grad=False)
    return parameter.grad
