"""The estimate of a batch that is taken in parts of its samples, one after the other."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from .kept_by_parameters import Known
from .noise.lessons import Lessons
from .noise.prediction import NOTHING, NoPrediction, Prediction
from .noise.sharded import Sharded
from .noise.signs import Noise
from .passes.kept_plans import Width
from .passes.program_passes import Passes
from .passes.sample_parts import Division, Inseparable, agree, can_be_cut
from .passes.two_passes import Estimate, looked_at, two_passes
from .plan.noise_plan import Changed, NoisePlan
from .program.loss_program import LossProgram

__all__ = ["ByParts", "division_of"]

log = logging.getLogger("jetplane")


def division_of(
    plan: NoisePlan, width: Width, program: LossProgram, devices: list[torch.device], held: int
) -> Division | None:
    """How a batch is taken in parts: as its memory asks for, where its program allows it; None if it is not.

    ``held`` bytes are there all the time.
    """
    division = Division(plan.samples, width.parts(plan, held), width.tangents(plan))
    if division.count == 1 or program.has_aux or not plan.apart or not can_be_cut(program.batch, plan.samples):
        return None
    if not agree(program.loss_fn, program.batch, division, devices):
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
        self._plan: NoisePlan | None = None
        self._last: Prediction | NoPrediction = NOTHING

    def losses(self, program: LossProgram) -> Tensor:
        """Those of all samples (B,), their gradients added.

        Raises Inseparable, or Changed where parts are other programs than the first of them.
        """
        return torch.cat([self._part(program, number) for number in range(self.division.count)])

    def settle(self) -> None:
        """Learn from all parts."""
        if isinstance(self._last, Prediction):
            self._last.settle(self._lessons.parts())

    def _part(self, program: LossProgram, number: int) -> Tensor:
        """The losses of one part. All of them follow the plan of the first."""
        program = replace(program, batch=self.division.part(program.batch, number))
        passes, offset = self.passes(program), number * self.division.size
        if number == 0:
            self._plan = self.known_plan(program)
            if self._plan is not None:
                with contextlib.suppress(Changed):
                    return self._follow(self._plan, passes, offset)
            self._plan = self.known.plans.find(passes, self.width)
            self.look(self._plan, passes)
        assert self._plan is not None
        return self._follow(self._plan, passes, offset)

    def _follow(self, plan: NoisePlan, passes: Passes, offset: int) -> Tensor:
        if not plan.apart:
            raise Inseparable("the samples of a part are coupled")
        control, count = self.known.control, self.width.tangents(plan)
        plan.whole = self.division.samples
        readout, self._last = looked_at(plan, None if control is None else control.learned, count)
        if isinstance(self._last, Prediction):
            self._last.lessons = self._lessons
        noise = Sharded(self.noise, plan, offset, self.division.samples)
        chunk = self.width.of(plan, self.held + self._last.held) if plan.sites else 1
        places = plan.resampled
        one = Estimate(plan, noise, noise, count, chunk, readout, self._last, self.exact, resampled=places)
        return two_passes(passes, one, partial(self.check, plan))[0]
