"""Plans are made when a program is new, kept, and looked at again now and then."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
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

log = logging.getLogger("jetplane")

_KEPT = 8  # plans for batches of one form
_WIDE, _PROBED = 64, 8  # tangents that a probe carries at once where they fit; where so many are asked for at a time
_PARTS = 8  # parts of a batch, or first passes, that save memory which nobody has said to be short
_EACH = 3  # what a tangent of a value holds at most, with what makes it, in units of the value


@dataclass(frozen=True)
class Width:
    """How many of J tangents are carried at a time, and of how many samples."""

    samples: int | None  # None: as many as a program needs
    chunk_size: int | None
    memory: int | None  # bytes; None: by the program, and one tangent at a time is always allowed
    least: int = 0  # bytes that are allowed whatever the program is, where no ``memory`` is given

    def part(self, plan: NoisePlan, held: int = 0, even: bool = False) -> int:
        """How many samples a batch is to be taken in at a time, so that they hold no more than there is.

        All tangents of a sample go together, so nothing is computed twice. Where a part is still too much for a memory
        that was given, they go in chunks as well. A last part that is smaller is another program, so there is one only
        where parts of one size would be twice as many; none if they are to be ``even``.
        """
        samples = plan.samples
        if self.chunk_size is not None or plan.trace is None or not plan.sites:
            return samples
        limit, whole = self._limit(plan), plan.trace.peak(self.tangents(plan))
        most = samples if self.memory is not None else min(samples, _PARTS)
        fewest = next((n for n in range(1, most) if whole * math.ceil(samples / n) / samples + held <= limit), most)
        alike = [count for count in range(1, most + 1) if samples % count == 0]
        enough = [count for count in alike if fewest <= count < 2 * fewest]
        if even:
            enough = [count for count in alike if count >= fewest] or alike[-1:]
        return math.ceil(samples / (enough or [fewest])[0])

    def of_part(self, samples: int) -> Width:
        """For the parts of a batch with ``samples`` tangents."""
        return replace(self, samples=samples, chunk_size=samples if self.memory is None else None)

    def _limit(self, plan: NoisePlan) -> int:
        if self.memory is not None:
            return self.memory
        return max(plan.budget, self.least)

    def tangents(self, plan: NoisePlan) -> int:
        """J, for one program."""
        return self.samples or plan.tangents

    def of(self, plan: NoisePlan, held: int = 0) -> int:
        """For one program, of which ``held`` bytes are there all the time."""
        most = self.tangents(plan)
        if self.chunk_size is not None:
            return min(most, self.chunk_size)
        parts = math.ceil(most / self.fitting(plan, most, held))
        if self.memory is None:
            parts = min(parts, _PARTS)
        return math.ceil(most / parts)  # chunks of one size: as few passes, and less memory

    def fitting(self, plan: NoisePlan, most: int, held: int = 0) -> int:
        """How many tangents, up to ``most``, a pass within the budget carries."""
        if plan.trace is None:  # however many there are, they are small
            return most
        limit, fitting = self._limit(plan), 0
        while fitting < most and plan.trace.peak(fitting + 1) + held <= limit:
            fitting += 1
        if not fitting and self.memory is not None:
            needed = plan.trace.peak() + held
            raise ValueError(
                f"memory is {readable(self.memory)}, but one tangent at a time needs {readable(needed)}; expected at "
                "least as much."
            )
        return max(fitting, 1)

    def is_to_measure(self, plan: NoisePlan) -> bool:
        """Whether it has to be known what a pass of a program holds."""
        if plan.trace is not None or self.chunk_size is not None:
            return False
        return self.memory is not None or plan.values * _EACH * _WIDE > self._limit(plan)


@dataclass(eq=False)
class KeptPlans:
    """The plans of the programs that were met."""

    _by_form: dict[Any, list[NoisePlan]] = field(default_factory=dict)  # of the batch; last used first

    def known(self, program: LossProgram, width: Width, probe_every: int) -> NoisePlan | None:
        """The plan that the next call of a program will probably follow; None if it is to be made or looked at."""
        plans = self._by_form.get(program.form)
        if not plans or plans[0].due or width.is_to_measure(plans[0]):
            return None
        if not capturing():
            plans[0].age += 1
            if plans[0].age % probe_every == 0:
                plans[0].due = True
                return None
        return plans[0]

    def measured(self, passes: Passes, width: Width) -> NoisePlan:
        """The plan of what the program does now, with what a pass holds; one that is known, or a new one.

        It is to be completed by :meth:`find`, where its batch is not taken in parts.
        """
        plan = _taken_out(self._by_form.setdefault(passes.program.form, []), passes.record())
        _measure(plan, passes, width)
        return plan

    def find(self, passes: Passes, width: Width, plan: NoisePlan | None = None) -> NoisePlan:
        """The plan of what the program does now, or one that was measured, complete."""
        plan = self.measured(passes, width) if plan is None else plan
        plans = self._by_form.setdefault(passes.program.form, [])
        if plan.due:
            what = len(plan.keys), len(plan.sites), plan.samples
            log.info("planning a program of %d operations: noise at %d places, %d samples", *what)
            if _find_layouts(plan, passes, width):
                plan = _completed(plan, passes, width)
            else:
                log.info("the losses are NaN, which tells nothing of samples: planned again with the next batch")
        plans.insert(0, plan)
        del plans[_KEPT:]
        return plan


def _taken_out(plans: list[NoisePlan], new: NoisePlan) -> NoisePlan:
    """The plan of the same program, if there is one among those that are kept, where it is no more."""
    for place, known in enumerate(plans):
        if known.is_of(new):
            return plans.pop(place)
    return new


def _completed(plan: NoisePlan, passes: Passes, width: Width) -> NoisePlan:
    """The plan whose samples were looked for, or one that tells more of them apart, with its tokens."""
    if plan.age == 0:
        plan = _apart(plan, passes, width)
    find_tokens(plan, partial(passes.look, plan), _wide(plan, width))
    plan.due = False
    log.info("planned: samples are told apart at %d places, tokens at %d", *_known_at(plan))
    return plan


def _find_layouts(plan: NoisePlan, passes: Passes, width: Width) -> bool:
    return find_layouts(plan, partial(passes.carry, plan, masked=False), _wide(plan, width))


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


def _known_at(plan: NoisePlan) -> tuple[int, int]:
    """At how many sites samples and tokens are told apart."""
    return sum(site.layout is not None for site in plan.sites), sum(site.reach is not None for site in plan.sites)


def _coupled(plan: NoisePlan) -> list[Site]:
    """The sites at which samples are coupled, and not by a batch norm, of which more is known."""
    return [site for site in plan.sites if site.coupled and site.layout is None]


def _wide(plan: NoisePlan, width: Width) -> int:
    """How many tangents a probe carries."""
    return max(_PROBED, width.chunk_size) if width.chunk_size is not None else width.fitting(plan, _WIDE)


def _measure(plan: NoisePlan, passes: Passes, width: Width) -> None:
    if width.is_to_measure(plan):
        plan.trace = _measured(passes, plan)
        log.info("A pass with one tangent holds %s", readable(plan.trace.peak()))


def _measured(passes: Passes, plan: NoisePlan) -> Trace:
    """What a pass with one tangent holds."""

    def rows(site: Site, like: Tensor) -> Tensor:
        return torch.zeros_like(like).unsqueeze(0)

    with Trace.of(tensor.device for tensor in passes.parameters.tensors) as trace:
        passes.carry(plan, rows, 1)
    return trace
