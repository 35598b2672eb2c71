"""The passes of a step as a compiled graph, up to the numbers of the model; all that follows is :mod:`.step`'s.

A compiled step that must stop there has this in place of :mod:`.compiled_step`: in a process group, where these numbers
are exchanged, and with a journal, whose replay has to make the update by the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ..ad.algebra.jet import Quadratic
from ..ad.run.casting import Casts
from ..compiler.capture import Graph, Run, compiled
from ..compiler.programs import Programs
from ..compiler.replayed import Replayed
from ..directions import Memory
from .closures import Measured
from .device_numbers import DeviceNumbers
from .moving import Moving
from .program_reads import Reads, check_runs_once, same
from .step_settings import Numbers, StepSettings
from .step_traced import Frame, Notes, draw, inputs_of, sweep

__all__ = ["CompiledSweep", "refuse_split"]


def refuse_split(settings: StepSettings) -> None:
    """Raise for settings that compiled passes do not have."""
    if settings.chunk_size is not None:
        size = settings.chunk_size
        raise ValueError(f"chunk_size is {size!r}, which needs several passes; expected None with compile=True.")
    if settings.fitting is not None:
        memory = settings.fitting.memory
        raise ValueError(f"memory is {memory!r}, which may need several passes; expected None with compile=True.")
    if settings.samples != 1:
        raise ValueError(f"samples is {settings.samples}; expected 1 with compile=True.")
    if settings.family.init().size is not None:
        raise ValueError("the directions change their number between steps; expected a fixed K with compile=True.")


class _Sweeping(NamedTuple):
    """One call, on both sides of the program between them."""

    moving: Moving
    memory: list[Tensor]
    numbers: DeviceNumbers
    made: list[Any]  # what the graph finds: the model's parts, the number of samples, the parameters that are read


class CompiledSweep:
    """The passes of one optimizer's steps as graphs, one for each program and signature."""

    def __init__(self, settings: StepSettings, moving: Moving, groups: int) -> None:
        refuse_split(settings)
        self._programs = Programs(self._build)
        self._settings, self._scaled = settings, groups > 1
        self._baked = [*settings, groups, *moving.tensors]
        self._numbers = DeviceNumbers(moving.device, len(moving.tensors))
        self._call: _Sweeping  # the one under way

    def knows(self, settings: StepSettings, moving: Moving, groups: int) -> bool:
        """Whether the optimizer is still what it was."""
        return same(self._baked, [*settings, groups, *moving.tensors])

    def __call__(
        self,
        func: Callable[..., Any],
        casts: Casts,
        batch: tuple[Any, ...],
        moving: Moving,
        memory: Memory,
        now: Numbers,
        has_aux: bool,
    ) -> Measured | None:
        """The model in the plane of a step; None where the program has to be run as it is, and nothing was run."""
        if self._programs.gave_up(func, casts, batch, has_aux):
            return None
        self._numbers.set(now, moving)
        kept = [tensor for tensors in memory.values() for tensor in tensors]
        call = self._call = _Sweeping(moving, kept, self._numbers, [])
        try:
            returned = self._programs.call(func, casts.around, casts, batch, has_aux)
        finally:
            del self._call
        if returned is None:
            return None
        parts, count, used = call.made
        loss, slope, curvature, *noise = parts
        model = Quadratic(loss, slope, curvature, *noise)
        return Measured(model, count, used, returned[1] if has_aux else None)

    def _build(self, graph: Graph, inputs: Sequence[Tensor]) -> Run:
        """The passes over one graph of the program, compiled."""
        moving = self._call.moving
        reads = Reads(graph, inputs, moving)
        frame, notes = Frame(graph, self._settings, moving, reads.found, self._scaled), Notes()
        body = partial(_measure, frame, notes)
        everything = [*inputs, *self._call.memory, *self._call.numbers.tensors]
        run = compiled(body, everything, None if graph.random else body)
        if graph.random:
            check_runs_once(notes.backward, self._settings)
        many = Replayed(run, run.written) if moving.device.type == "cuda" else None

        def swept(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            reads.check(inputs)
            call = self._call
            given = [*inputs, *call.memory, *call.numbers.tensors]
            found = run(given) if many is None else [one[0] for one in many(given, {}, 1)]
            outputs, parts = found[: graph.outputs], found[graph.outputs :]
            loss = outputs[graph.loss]
            call.made[:] = [parts, loss.numel() * loss.ndim, reads.used]
            return outputs

        return swept


def _measure(frame: Frame, notes: Notes, inputs: list[Tensor]) -> list[Tensor]:
    """The program's outputs, and loss, slope, curvature and, where there is one, noise of its model."""
    known = inputs_of(frame, inputs)
    swept = sweep(frame, known, draw(frame, notes, known))
    model = swept.measured
    noise = [] if model.noise is None else [model.noise]
    return [*swept.outputs, model.loss.clone(), model.slope, model.curvature, *noise]
