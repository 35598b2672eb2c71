"""The steps of a journal taken once more: no closure, no pass, only the directions and the update that they made."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ad.algebra.jet import Quadratic
from ..ad.finite import finite
from ..ad.run.casting import casts_around, uncast
from ..curvature import NoCurvature
from ..directions import Memory
from ..directions.earlier import adopted as adopted_family
from ..errors import JournalDamaged, JournalRefused, ReplayDiffers
from ..optim.moving import Moving
from ..optim.step import Accepted, Solved, Swept, apply, draw, learn, moves
from ..optim.step_settings import Numbers, StepSettings
from ..parallel.averages import Averages
from ..solvers import NegativeSlope, Status
from ..solvers.adopted import adopted as adopted_solver
from .identity import machine
from .plain_steps import MOST, kind_of, take_together
from .raw_bytes import digest, dtype_of, tensor_of
from .recipes import family_of
from .snapshots import Standing, named
from .step_record import StepRecord

__all__ = ["Replica", "settings_of"]


def settings_of(header: dict[str, Any]) -> StepSettings:
    """The parts that a replay needs; of the solver and the curvature nothing is asked."""
    family, solver = adopted_family(family_of(header["directions"])), adopted_solver(NegativeSlope())
    return StepSettings(family, NoCurvature(), solver, 1, None, header["maximize"], None, None, None)


class _Known(NamedTuple):
    """What a replay knows of the closures of a step."""

    used: Sequence[bool]
    averages: Averages = Averages()  # what processes had to agree on is in the record

    def gradient(self) -> list[Tensor]:
        raise AssertionError("a replayed step asked for a gradient")  # such families are refused


class Replica:
    """Parameters, buffers and what directions remember, moved by records."""

    def __init__(self, header: dict[str, Any], device: torch.device) -> None:
        self.header, self.settings = header, settings_of(header)
        self.names = [name for name, *_ in header["parameters"]]
        self.groups = [group for *_, group in header["parameters"]]
        self.leaves = [
            torch.empty_strided(shape, stride, dtype=dtype_of(dtype), device=device)
            for _, shape, dtype, stride, _ in header["parameters"]
        ]
        self.buffers = {
            name: torch.zeros(shape, dtype=dtype_of(dtype), device=device) for name, shape, dtype in header["buffers"]
        }
        slots = self.settings.family.init().slots
        self.memory: dict[str, list[Tensor]] = {
            name: [torch.zeros((*axes, *leaf.shape), dtype=leaf.dtype, device=device) for leaf in self.leaves]
            for name, axes in slots.items()
        }
        self.numbers = Numbers(header["seed"], header["first"], 0, None, None)
        self.lrs: Sequence[float] = []  # of the groups, at the last step; none where there was none
        self.decays: Sequence[float] = []
        self.place: Any = None
        self._moved: set[int] = set()  # leaves, which training has left finite

    @property
    def step(self) -> int:
        """How many steps were taken."""
        return self.numbers.step

    @property
    def named(self) -> dict[str, Tensor]:
        """All that a step may change, by the names in a snapshot."""
        return named(self.leaves, list(self.buffers.values()), self.memory)

    @property
    def exported(self) -> dict[str, Tensor]:
        """Parameters and buffers by their own names, as in the model's state_dict."""
        leaves = dict(zip(self.names, self.leaves, strict=True))
        aliases = {name: self.leaves[place] for name, place in self.header["aliases"].items()}
        unsaved = set(self.header["unsaved"])
        return leaves | aliases | {name: one for name, one in self.buffers.items() if name not in unsaved}

    @torch.no_grad()
    def stand(self, state: Standing, tensors: dict[str, Tensor]) -> None:
        """Stand where a snapshot does."""
        for name, tensor in self.named.items():
            tensor.copy_(tensors[name])
        self.numbers = Numbers(self.numbers.seed, state.step, state.bad, state.solver_state, state.size)
        self.lrs, self.decays, self.place = state.lrs, state.decays, state.place

    @torch.no_grad()
    def begin(self, tensors: dict[str, Tensor], source: object) -> None:
        """Stand where the run began, by parameters and buffers under their own names."""
        for name, tensor in self.exported.items():
            if name not in tensors or tensors[name].shape != tensor.shape or tensors[name].dtype != tensor.dtype:
                found = f"{tuple(tensors[name].shape)} {tensors[name].dtype}" if name in tensors else "not there"
                expected = f"{tuple(tensor.shape)} {tensor.dtype}"
                raise JournalRefused(f"{name} is {found} in {source}; expected {expected}, as the run began.")
            tensor.copy_(tensors[name])
        self.numbers = self.numbers._replace(size=self.settings.family.init().size)
        if digest(self.named.values()).hex() != self.header["start"]:
            raise JournalRefused(f"{source} holds other numbers than those that the run began with.")

    @torch.no_grad()
    def take(self, records: Sequence[StepRecord]) -> None:
        """Take a step once more; or several together, which are of one kind (:mod:`.plain_steps`)."""
        with uncast(casts_around(self.leaves[0].device)):  # which is for closures alone
            if len(records) > 1 or kind_of(records[0], self.header, self.groups) is not None:
                self._moved.update(take_together(records, self.leaves, self.groups))
            elif records[0].status is Status.OK:
                self._move(records[0])
        record = records[-1]
        for number, data in {number: data for one in records for number, data in one.buffers.items()}.items():
            buffer = list(self.buffers.values())[number]
            buffer.copy_(tensor_of(data, buffer.dtype, buffer.shape))
        self.numbers = Numbers(record.seed, record.step + 1, record.bad, record.solver_state, record.size)
        self.lrs, self.decays, self.place = record.lrs, record.decays, record.place
        if record.digest is not None and record.digest != digest(self.named.values()):
            raise ReplayDiffers(
                f"after step {record.step} the replay has other parameters than training had: they were changed by "
                f"something else than steps, or this machine rounds otherwise{self._elsewhere()}."
            )

    def _elsewhere(self) -> str:
        """Where the run was, if that was not here."""
        there, here = self.header["machine"], machine(self.leaves[0].device)
        return "" if there == here else f" ({there} there, {here} here)"

    def _move(self, record: StepRecord) -> None:
        settings = self.settings._replace(samples=len(record.coefficients))
        moving, places = self._moving(record)
        memory: Memory = {name: [kept[place] for place in places] for name, kept in self.memory.items()}
        now = Numbers(record.seed, record.step, 0, None, self.numbers.size)
        program: Any = _Known([True] * len(places) if record.used is None else record.used)
        self._moved.update(compress(places, program.used))
        coefficients = list(record.coefficients.to(moving.device))
        drawn = draw(settings, now, program, moving, memory)
        deltas = moves(drawn, coefficients, moving, program.used, record.block)
        solved = Solved(Status.OK, coefficients, deltas, record.factor)
        accepted = Accepted(Status.OK, record.factor, None, None)
        apply(accepted, solved, program, moving, keep=bool(memory), known=True)  # to look would wait for the device
        if memory:
            assert record.slopes is not None
            models = [_sloped(slope.to(moving.device)) for slope in record.slopes]
            learn(settings, now, program, memory, drawn, Swept(models, models, record.block), solved, accepted)

    def _moving(self, record: StepRecord) -> tuple[Moving, list[int]]:
        """The parameters that moved, and their places among all."""
        flags = [True] * len(self.leaves) if record.moving is None else record.moving
        places = [place for place, moved in enumerate(flags) if moved]
        groups = [self.groups[place] for place in places]
        return Moving(
            [self.leaves[place] for place in places],
            [self.names[place] for place in places],
            [record.lrs[group] for group in groups],
            [record.decays[group] for group in groups],
        ), places

    def take_all(self, records: Iterable[StepRecord]) -> None:
        """Take steps once more, one after the other."""
        together: list[StepRecord] = []
        kind: Hashable | None = None
        expected = self.step
        for record in records:
            if record.step != expected:
                raise JournalDamaged(f"the record after step {expected} is that of step {record.step}.")
            expected += 1
            last, kind = kind, kind_of(record, self.header, self.groups)
            if together and (kind is None or kind != last or len(together) == MOST):
                self.take(together)
                together = []
            together.append(record)
            if kind is None or record.digest is not None:
                self.take(together)
                together = []
        if together:
            self.take(together)
        if not finite([self.leaves[place] for place in self._moved]):
            raise ReplayDiffers(
                f"after {self.step} steps the replay has numbers that are not finite, and training had none."
            )


def _sloped(slope: Tensor) -> Quadratic:
    """A model of which only the slope is known."""
    return Quadratic(slope.new_zeros(()), slope, slope.new_zeros(len(slope), len(slope)))
