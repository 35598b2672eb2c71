"""Steps as compiled graphs: what is compiled for which program, when it is compiled anew, and what is refused.

The step itself is :mod:`.step_traced`. Dynamo stands between a call and its graph: it hands the graph the tensors that
the program reads, and gives back what the program returns. What a call has to say beyond that, and what the graph finds
beyond that, is in one :class:`Call`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.run.casting import Casts
from ..compiler.capture import Compiled, Graph, Run, compiled
from ..compiler.programs import Programs
from ..compiler.replayed import Replayed, repeated
from ..compiler.several import Several
from ..directions import Memory
from ..solvers.adopted import Called, traces
from .compiled_sweep import refuse_split
from .device_numbers import DeviceNumbers
from .moving import Moving
from .program_reads import Reads, check_runs_once, same
from .reports import Packing, Reports
from .step_settings import Numbers, StepSettings
from .step_traced import Frame, Notes, take

__all__ = ["CompiledStep", "refuse"]


def refuse(settings: StepSettings) -> None:
    """Raise for settings that a compiled step does not have."""
    refuse_split(settings)
    if settings.accept is not None and settings.accept.backtracks:
        backtracks = settings.accept.backtracks
        raise ValueError(f"the acceptance has {backtracks} backtracks; expected 0 with compile=True.")
    if not traces(settings.solver):
        given = settings.solver.solver if isinstance(settings.solver, Called) else settings.solver
        name = type(given).__name__
        raise ValueError(f"the solver {name} asks the host; expected one with a method traced with compile=True.")


@dataclass
class Call:
    """One call of a compiled step, on both sides of the program between them."""

    moving: Moving
    memory: list[Tensor]  # of the directions: all of one name after all of another
    numbers: DeviceNumbers
    several: Several
    made: tuple[Tensor, Packing] | None = None  # what the graph finds: the reports


class CompiledStep:
    """The steps of one optimizer as graphs, one for each program and signature."""

    def __init__(self) -> None:
        self._programs = Programs(self._build)
        self._settings: StepSettings
        self._baked: list[Any] = []  # all that the steps have baked in
        self._numbers: DeviceNumbers | None = None
        self._call: Call  # the one under way

    def __call__(
        self,
        func: Callable[..., Any],
        casts: Casts,
        batches: tuple[Any, ...],
        count: int,
        moving: Moving,
        memory: Memory,
        now: Numbers,
        has_aux: bool,
    ) -> Reports | None:
        """Take a step with each entry of the batches, and return their reports.

        None where the program has to be run as it is, and no step was taken.
        """
        several = Several.of(batches, count)
        if self._programs.gave_up(func, casts, several.first, has_aux):
            return None
        numbers = self._up_to_date(now, moving)
        kept = [tensor for tensors in memory.values() for tensor in tensors]
        call = self._call = Call(moving, kept, numbers, several)
        try:
            returned = self._programs.call(func, casts.around, casts, several.first, has_aux)
        finally:
            del self._call
        if returned is None:
            return None
        numbers.advance(count)
        assert call.made is not None
        return Reports(*call.made, _torch.pytree.tree_map(several.every, returned[1]) if has_aux else None)

    @property
    def bad(self) -> int:
        """How many steps in a row, up to the last, could not move the parameters. Waits for the device."""
        return 0 if self._numbers is None else self._numbers.bad

    @property
    def counted(self) -> dict[str, Any]:
        """What the device has counted, for the groups. Waits for it."""
        return {} if self._numbers is None else {"bad": self._numbers.bad, "solver_state": self._numbers.state}

    def reload(self) -> None:
        """Begin with the numbers of the groups, whatever the device has."""
        self._numbers = None

    def knows(self, settings: StepSettings, moving: Moving, groups: int) -> bool:
        """Whether the optimizer is still what it was when its steps were compiled."""
        return same(self._baked, _baked(settings, moving, groups))

    def renew(self, settings: StepSettings, moving: Moving, groups: int) -> None:
        """Forget the steps that were compiled."""
        refuse(settings)
        self._programs.clear()
        self._settings, self._baked = settings, _baked(settings, moving, groups)
        self._scaled, self._numbers = groups > 1, None

    def _up_to_date(self, now: Numbers, moving: Moving) -> DeviceNumbers:
        if self._numbers is None:
            self._numbers = DeviceNumbers(moving.device, len(moving.tensors))
        self._numbers.set(now, moving)
        return self._numbers

    # -- one graph --------------------------------------------------------------------------------------------------

    def _build(self, graph: Graph, inputs: Sequence[Tensor]) -> Run:
        """The step over one graph of the program, compiled."""
        moving = self._call.moving
        reads = Reads(graph, inputs, moving)
        frame = Frame(graph, self._settings, moving, reads.found, self._scaled)
        run, packing = _compiled(frame, [*inputs, *self._call.memory, *self._call.numbers.tensors])
        on_cuda = self._call.numbers.device.type == "cuda"
        many = Replayed(run, run.written) if on_cuda else partial(repeated, run)

        def step(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            reads.check(inputs)
            call = self._call
            fed = call.several.fed(inputs)
            *outputs, packed = many([*inputs, *call.memory, *call.numbers.tensors], fed, call.several.count)
            call.made = packed, packing
            return call.several.keep(outputs)

        return step


def _baked(settings: StepSettings, moving: Moving, groups: int) -> list[Any]:
    return [*settings, groups > 1, any(moving.decays), str(moving.device), *moving.tensors]


_SHARED: OrderedDict[Any, tuple[Compiled, Packing]] = OrderedDict()  # steps that are alike but for their tensors
_KEPT = 16


def _compiled(frame: Frame, inputs: list[Tensor]) -> tuple[Compiled, Packing]:
    """The compiled step: that of another optimizer where all but the tensors is the same, as for several seeds."""
    key = _key(frame, inputs)
    if key is not None and key in _SHARED:
        _SHARED.move_to_end(key)
        return _SHARED[key]
    notes, random = Notes(), frame.graph.random
    body = partial(take, frame, notes)
    run = compiled(body, inputs, None if random else body)
    if random:
        check_runs_once(notes.backward, frame.settings)
    made = run, Packing(frame.k, notes.dtype, frame.settings.evaluates)
    if key is not None:
        _SHARED[key] = made
        if len(_SHARED) > _KEPT:
            _SHARED.popitem(last=False)
    return made


def _key(frame: Frame, inputs: list[Tensor]) -> Any:
    """All that a compiled step depends on but the values of its inputs; None where that cannot be said."""
    key = frame.key()
    tensors = tuple((tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad) for t in inputs)
    return None if key is None else (*key, tensors, _ambient(inputs))


def _ambient(inputs: list[Tensor]) -> Any:
    """What of torch's global state changes what a program is traced to."""
    kind = inputs[0].device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return cast, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
