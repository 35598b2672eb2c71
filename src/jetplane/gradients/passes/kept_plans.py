"""Plans are made when a program is new, kept, and looked at again now and then."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ad.run.budget import Trace, readable
from ..plan.noise_plan import NoisePlan, Site
from ..plan.probe import find_layouts
from ..plan.tokens import find_tokens
from ..program.loss_program import LossProgram
from .program_passes import Passes, capturing

__all__ = ["KeptPlans", "Width"]

_KEPT = 8  # plans for batches of one form
_WIDE = 8  # tangents that a probe may carry at once, however few are asked for


@dataclass(frozen=True)
class Width:
    """How many of J tangents are carried at a time."""

    samples: int | None  # None: as many as a program needs
    chunk_size: int | None
    memory: int | None  # bytes

    def tangents(self, plan: NoisePlan) -> int:
        """J, for one program."""
        return self.samples or plan.tangents

    def of(self, plan: NoisePlan, held: int = 0) -> int:
        """For one program, of which ``held`` bytes are there all the time."""
        most = self.tangents(plan)
        if self.memory is None:
            return min(most, self.chunk_size or most)
        assert plan.trace is not None
        fitting = 0
        while fitting < most and plan.trace.peak(fitting + 1) + held <= self.memory:
            fitting += 1
        if not fitting:
            needed = plan.trace.peak() + held
            raise ValueError(
                f"memory is {readable(self.memory)}, but one tangent at a time needs {readable(needed)}; expected at "
                "least as much."
            )
        return fitting


@dataclass(eq=False)
class KeptPlans:
    """The plans of the programs that were met."""

    _by_form: dict[Any, list[NoisePlan]] = field(default_factory=dict)  # of the batch; last used first

    def known(self, program: LossProgram, width: Width, probe_every: int) -> NoisePlan | None:
        """The plan that the next call of a program will probably follow; None if it is to be made or looked at."""
        plans = self._by_form.get(program.form)
        if not plans or plans[0].due or (width.memory is not None and plans[0].trace is None):
            return None
        if not capturing():
            plans[0].age += 1
            if plans[0].age % probe_every == 0:
                plans[0].due = True
                return None
        return plans[0]

    def find(self, passes: Passes, width: Width) -> NoisePlan:
        """The plan of what the program does now: one that is known, or a new one."""
        plans = self._by_form.setdefault(passes.program.form, [])
        plan = _taken_out(plans, passes.record())
        _measure(plan, passes, width)
        if plan.due:
            _find_layouts(plan, passes, width)
            if plan.age == 0:
                plan = _apart(plan, passes, width)
            find_tokens(plan, partial(passes.look, plan), _wide(plan, width))
            plan.due = False
        plans.insert(0, plan)
        del plans[_KEPT:]
        return plan


def _taken_out(plans: list[NoisePlan], new: NoisePlan) -> NoisePlan:
    """The plan of the same program, if there is one among those that are kept, where it is no more."""
    for place, known in enumerate(plans):
        if known.is_of(new):
            return plans.pop(place)
    return new


def _find_layouts(plan: NoisePlan, passes: Passes, width: Width) -> None:
    find_layouts(plan, partial(passes.carry, plan, masked=False), _wide(plan, width))


def _apart(plan: NoisePlan, passes: Passes, width: Width) -> NoisePlan:
    """The plan, or one whose noise enters behind what samples share, where that is found to tell them apart there.

    Shapes do not always say what is shared: a table (T, d) of positions looks like samples where T or d is a multiple
    of their number. Sites at which samples are coupled are moved on, and stay where that was of no use.
    """
    found, moved = plan, _coupled(plan)
    for _ in range(2):
        together = {node for site in moved for node in site.group.nodes}
        if not together:
            return found
        other = passes.record(together)
        if not other.is_of(plan) or other.ends.keys() == plan.ends.keys():
            return found
        _measure(other, passes, width)
        _find_layouts(other, passes, width)
        layers = {layer for site in _coupled(other) for layer in site.group.calls}
        useful = [site for site in moved if layers.isdisjoint(site.group.calls)]
        if len(useful) == len(moved):
            return other
        moved = useful
    return found


def _coupled(plan: NoisePlan) -> list[Site]:
    """The sites at which samples are coupled, and not by a batch norm, of which more is known."""
    return [site for site in plan.sites if site.coupled and site.layout is None]


def _wide(plan: NoisePlan, width: Width) -> int:
    """How many tangents a probe carries."""
    return width.of(plan) if width.memory is not None else max(_WIDE, width.of(plan))


def _measure(plan: NoisePlan, passes: Passes, width: Width) -> None:
    if width.memory is not None and plan.trace is None:
        plan.trace = _measured(passes, plan)


def _measured(passes: Passes, plan: NoisePlan) -> Trace:
    """What a pass with one tangent holds."""

    def rows(site: Site, like: Tensor) -> Tensor:
        return torch.zeros_like(like).unsqueeze(0)

    with Trace.of(tensor.device for tensor in passes.parameters.tensors) as trace:
        passes.carry(plan, rows, 1)
    return trace
