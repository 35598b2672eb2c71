"""The estimate of a batch that is taken in parts of its samples, one after the other."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .kept_by_parameters import Known
from .noise.lessons import Lessons
from .noise.prediction import NOTHING, NoPrediction, Prediction
from .noise.sharded import Sharded
from .noise.signs import Noise
from .passes.kept_plans import Width
from .passes.program_passes import Passes
from .passes.sample_parts import Division, Inseparable, agree, can_be_cut, put_together
from .passes.two_passes import Estimate, looked_at, two_passes
from .plan.noise_plan import Changed, NoisePlan
from .program.loss_program import LossProgram

__all__ = ["ByParts", "division_of"]

log = logging.getLogger("jetplane")


def division_of(
    plan: NoisePlan, width: Width, program: LossProgram, devices: list[torch.device], held: int, even: bool = False
) -> Division | None:
    """How a batch is taken in parts: as its memory asks for, where its program allows it; None if it is not.

    ``held`` bytes are there all the time. Parts are of one size if they are to be ``even``.
    """
    division = Division(plan.samples, width.part(plan, held, even), width.tangents(plan))
    if division.count == 1 or not plan.apart or not can_be_cut(program.batch, plan.samples):
        return None
    if not agree(program, division, devices):
        log.info(
            "a batch of %d samples is taken whole: its parts have other losses, or aux that has not an entry for each "
            "sample",
            division.samples,
        )
        return None
    log.info("a batch of %d samples is taken in %d parts", division.samples, division.count)
    return division


@dataclass(eq=False)
class ByParts:
    """The passes of the parts of one batch. Noise is that of the batch, whatever the parts.

    Gradients are added to ``.grad`` by each part, and what was learned from all of them at the end, by :meth:`settle`.
    """

    division: Division
    known: Known
    width: Width  # of a part
    noise: Noise
    exact: bool
    check: Callable[[NoisePlan], None]  # before the first gradient of a part
    passes: Callable[[LossProgram], Passes]
    known_plan: Callable[[LossProgram], NoisePlan | None]  # of a part; None if it is to be made
    look: Callable[[NoisePlan, Passes], None]  # at a plan that is new, and its program
    held: int  # bytes, beside what a part's passes hold

    def __post_init__(self) -> None:
        self._lessons = Lessons()
        self._plans: dict[Any, NoisePlan] = {}  # by form: the last part may have fewer samples
        self._alike: tuple[Any, ...] | None = None  # what all parts have in common
        self._last: Prediction | NoPrediction = NOTHING

    def run(self, program: LossProgram) -> tuple[Tensor, Any]:
        """The losses of all samples (B,), and what came with them; their gradients are added.

        Raises Inseparable, or Changed where parts are other programs than the first of them.
        """
        parts = [self._part(program, number) for number in range(self.division.count)]
        losses: Tensor
        losses, aux = put_together(parts, self.division)
        return losses, aux

    def settle(self) -> None:
        """Learn from all parts."""
        if isinstance(self._last, Prediction):
            self._last.settle(self._lessons.parts())

    def _part(self, program: LossProgram, number: int) -> tuple[Tensor, Any]:
        """What one part gives. All of one size follow the plan of the first."""
        program = replace(program, batch=self.division.part(program.batch, number))
        passes, offset, form = self.passes(program), number * self.division.size, program.form
        if form not in self._plans:
            plan = self.known_plan(program)
            if plan is not None:
                self._plans[form] = plan
                with contextlib.suppress(Changed):
                    return self._follow(plan, passes, offset)
            self._plans[form] = plan = self.known.plans.find(passes, self.width)
            self.look(plan, passes)
        return self._follow(self._plans[form], passes, offset)

    def _follow(self, plan: NoisePlan, passes: Passes, offset: int) -> tuple[Tensor, Any]:
        if not plan.apart:
            raise Inseparable("the samples of a part are coupled")
        control, count = self.known.control, self.width.tangents(plan)
        plan.whole = self.division.samples
        readout, self._last = looked_at(plan, None if control is None else control.learned, count)
        if isinstance(self._last, Prediction):
            self._last.lessons = self._lessons
        alike = plan.name, [*self._last.sites], None if plan.tokens is None else plan.tokens.count
        if self._alike not in (None, alike):
            raise Inseparable("a smaller part has noise at other places")
        noise = Sharded(self.noise, plan, offset, self.division.samples)
        chunk = self.width.of(plan, self.held + self._last.held) if plan.sites else 1
        places = plan.resampled
        one = Estimate(plan, noise, noise, count, chunk, readout, self._last, self.exact, resampled=places)
        found = two_passes(passes, one, partial(self.check, plan))
        self._alike = alike
        return found
