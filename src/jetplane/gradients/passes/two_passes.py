"""One estimate: the pass that carries the noise to the losses, and the one that makes gradients of what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...parallel.tangents import Tangents
from ..noise.learned import Learned
from ..noise.prediction import NOTHING, NoPrediction, Prediction
from ..noise.readout import Readout
from ..noise.signs import Noise, Signs
from ..noise.statistics import Statistics
from ..plan.noise_plan import NoisePlan, Site
from .program_passes import Passes
from .resampling import resampled
from .shared_tangents import together

__all__ = ["Estimate", "looked_at", "two_passes"]


@dataclass(frozen=True, eq=False)
class Estimate:
    """What of one estimate is known before its passes."""

    plan: NoisePlan
    noise: Noise
    again: Noise  # the same numbers, for the second pass
    count: int  # J
    chunk: int  # tangents that are carried at a time
    readout: Readout | None
    prediction: Prediction | NoPrediction
    exact_norms: bool = False  # whether nothing that batch norms add is left out
    sharing: Tangents | None = None  # the processes that carry other tangents of the same samples
    resampled: tuple[int, ...] = ()  # places in the batch, if it is to be drawn again
    shapes: dict[int, Tensor] = field(default_factory=dict)  # by site, of noise in samples' own weights: found once

    def draw_ahead(self, start: int, stop: int) -> None:
        """Let the noise of tangents start to stop - 1 be drawn for several sites at once, where memory is not short."""
        if not isinstance(self.noise, Signs) or self.chunk < self.count:
            return
        sizes: dict[torch.device, dict[int, int]] = {}
        for site in self.plan.sites:
            sizes.setdefault(site.device, {})[site.number] = site.shape.numel()
        for device, some in sizes.items():
            self.noise.ahead(some, start, stop, device)

    def statistics(self) -> Statistics | None:
        """What the passes will see of batch norms; None where there are none."""
        return Statistics(self.plan, self.prediction, self.exact_norms) if self.plan.norms else None


def looked_at(
    plan: NoisePlan, learned: Callable[[NoisePlan, Readout | None], Learned | None] | None, count: int
) -> tuple[Readout | None, Prediction | NoPrediction]:
    """What is seen of the loss's input, where that is of use, and predicted of its ``count`` tangents."""
    readout = None if plan.tail is None else Readout(plan)
    known = None if learned is None else learned(plan, readout)
    prediction: Prediction | NoPrediction = NOTHING
    if known is not None and readout is not None:
        prediction = Prediction(plan, readout, known, count)
    if prediction.sites:
        return readout, prediction
    return None if plan.tokens is None else readout, NOTHING


def two_passes(
    passes: Passes, one: Estimate, check: Callable[[], None], look: Callable[[Statistics], None] | None = None
) -> tuple[Tensor, Any]:
    """Add the estimate to ``.grad``; the losses, and what came with them.

    ``check`` is called once the program has done what is planned, before any gradient is touched, and ``look`` then
    with what was seen of batch norms. Raises Changed where the program is another one.
    """
    plan = one.plan
    if not plan.sites:
        return passes.collect(plan, one.again, None, 1, check)
    if one.resampled:
        return _of_another_batch(passes, one, check)
    statistics, parts = one.statistics(), []
    mine = range(one.count) if one.sharing is None else one.sharing.mine(one.count)
    for start in range(mine.start, mine.stop, one.chunk):
        stop = min(start + one.chunk, mine.stop)
        one.draw_ahead(start, stop)
        rows = partial(_drawn, one.noise, start, stop)
        given = one.readout, one.prediction, statistics, one.shapes
        parts.append(passes.carry(plan, rows, stop - start, True, *given))
    check()
    found = torch.cat(parts)
    if one.sharing is not None:
        found = together(one.sharing, one.count, found, one.prediction, statistics)
    scalars = found / (one.count * plan.total)
    one.prediction.begin()
    if statistics is not None:
        statistics.close(one.count)
        if look is not None:
            look(statistics)
    return passes.collect(plan, one.again, scalars, one.chunk, None, one.prediction, statistics, one.shapes)


def _of_another_batch(passes: Passes, one: Estimate, check: Callable[[], None]) -> tuple[Tensor, Any]:
    """The same of a batch that is drawn from the one at hand."""
    other, losses, aux = resampled(one.plan, passes, one.resampled, one.noise)
    two_passes(other, replace(one, resampled=()), check)
    return losses, aux


def _drawn(noise: Noise, start: int, stop: int, site: Site, like: Tensor) -> Tensor:
    return noise.rows(site.number, start, stop, like)
