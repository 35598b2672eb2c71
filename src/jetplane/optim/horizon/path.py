"""Slope and curvature along one direction, and the way back along it: measurements that leave no trace."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...ad.engine.locate import users_level
from ...ad.run.directions import Directions, Given, Leaf
from ...ad.run.passes import Pass
from ...ad.run.replay import Replay
from ...ad.run.replay_traced import ReplayTraced
from ...curvature import Curvature, ExactHessian, GaussNewton, is_late
from ...errors import MissingBoundary
from ...parallel.crew import Crew

__all__ = ["Along", "Path"]

_NUMBERS = 5  # of a look: see `Along.of`
_WHAT = "the look along the path"


class Along(NamedTuple):
    """The mean loss along a direction m: f(theta + c m)."""

    slope: Tensor  # () in float64, at c = 0
    curvature: Tensor  # (), Gauss-Newton's there, or the exact one's size
    back: Tensor  # (): the curvature of the parabola with f(theta), this slope and f(theta - m); 0 if not looked at
    rise: Tensor  # (): f(theta) - f(theta - m), inf where only the latter is finite; the slope if not looked at
    size: Tensor  # (): the mean of the losses' absolute values

    @staticmethod
    def of(numbers: Tensor) -> Along:
        """From the mean loss, its slope, its curvature and its size at c = 0, and the mean loss at c = -1, (5,)."""
        loss, slope, curvature, size, other = numbers.unbind()
        rise = torch.where(torch.isfinite(other) & ~torch.isfinite(loss), torch.inf, loss - other)
        return Along(slope, curvature.abs(), (2 * (other - loss + slope)).clamp_min(0), rise, size)

    @property
    def best(self) -> Tensor:
        """The c with the least loss, by the larger one of the curvatures."""
        return -self.slope / torch.maximum(self.curvature, self.back)


@dataclass(frozen=True)
class _Since:
    """The direction from other places of some leaves to where they are, made where the program reaches one."""

    leaves: Sequence[Tensor]
    places: Sequence[Tensor]
    k: int = 1

    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        return (self.leaves[position].detach() - self.places[position]).unsqueeze(0)[start:stop]


Losses = Callable[[], Tensor]


class Path:
    """Measures the losses of a function along directions from where the leaves are.

    The losses (B,) of a batch may be those of several functions, each of some samples: one is run after the other, and
    all that is held is what one of them needs.
    """

    def __init__(self, leaves: Sequence[Tensor], crew: Crew | None = None) -> None:
        self._leaves, self._crew = leaves, crew
        self._curvature: Curvature = GaussNewton()

    def at(self, leaves: Sequence[Tensor]) -> None:
        """From now on the leaves are these, as after they were gathered anew."""
        self._leaves = leaves

    def along(self, losses: Sequence[Losses], direction: Sequence[Tensor], replay: Replay | ReplayTraced) -> Along:
        """What ``losses`` do along ``direction``. Random numbers, buffers and leaves stay as they are."""
        return Along.of(self._numbers(losses, Given([part.unsqueeze(0) for part in direction]), replay, None))

    def since(self, places: Sequence[Tensor], losses: Sequence[Losses], replay: Replay | ReplayTraced) -> Along:
        """What ``losses`` do along the way from other ``places`` of the leaves to here, and are there.

        No copy of all leaves is made: neither of the way, nor to go there and come back.
        """
        return Along.of(self.numbers(places, losses, replay))

    def numbers(self, places: Sequence[Tensor], losses: Sequence[Losses], replay: Replay | ReplayTraced) -> Tensor:
        """What :meth:`since` is made of, means over the samples of ``losses``: see :meth:`Along.of`."""
        return self._numbers(losses, _Since(self._leaves, places), replay, places)

    @torch.no_grad()
    def _numbers(
        self,
        losses: Sequence[Losses],
        direction: Directions,
        replay: Replay | ReplayTraced,
        places: Sequence[Tensor] | None,
    ) -> Tensor:
        try:
            with self.told():
                numbers, counts = zip(*(self._measure(replay, one, direction) for one in losses), strict=True)
                others = None if places is None else self._back(replay, losses, places)
            found = [_mean(each, counts) for each in zip(*numbers, strict=True)]
            other = found[0] - found[1] if others is None else _mean(others, counts)
            return self.averaged(torch.stack([*found, other]), sum(counts))
        finally:
            replay.rewind()

    def told(self) -> contextlib.AbstractContextManager[None]:
        """Around what may fail: the other processes are told."""
        group = None if self._crew is None else self._crew.processes
        return contextlib.nullcontext() if group is None else group.telling(1 + _NUMBERS, _WHAT)  # and the count

    def averaged(self, numbers: Tensor, count: int) -> Tensor:
        """The numbers (5,), means over ``count`` samples here, as means over the samples of all processes."""
        group = None if self._crew is None else self._crew.processes
        if group is None:
            return numbers
        mine = torch.cat([numbers.new_ones(1), numbers]).cpu() * count
        total, *others = group.gather(mine, _WHAT)
        for record in others:
            total = total + record
        return (total[1:] / total[0]).to(numbers.device)

    def _measure(
        self, replay: Replay | ReplayTraced, losses: Losses, direction: Directions
    ) -> tuple[list[Tensor], int]:
        """The mean loss of some samples, its slope, curvature and size, and how many samples they are."""
        try:
            return self._pass(replay, losses, direction)
        except MissingBoundary as error:
            warnings.warn(f"{error} The exact curvature is taken instead.", UserWarning, stacklevel=users_level())
            self._curvature = ExactHessian()
            return self._pass(replay, losses, direction)

    def _pass(self, replay: Replay | ReplayTraced, losses: Losses, direction: Directions) -> tuple[list[Tensor], int]:
        pairs = self._curvature.pairs(1)
        one = Pass.of(pairs, is_late(self._curvature))
        for position, leaf in enumerate(self._leaves):
            one.perturb(Leaf(leaf, position, direction, (0,)), f"parameter {position}")

        def run() -> Tensor:
            with torch.no_grad(), one.running():
                return losses()

        jet = one.jet(replay.run(run, one.mode))
        model = self._curvature.model(jet, pairs)
        numbers = model.loss, model.slope[0], model.curvature[0, 0], jet.primal.abs().mean()
        return [number.to(torch.float64) for number in numbers], jet.primal.numel()

    def _back(self, replay: Replay | ReplayTraced, losses: Sequence[Losses], places: Sequence[Tensor]) -> list[Tensor]:
        """The mean losses at other places of the leaves, which change places with them for a while."""
        self._exchange(places)
        try:
            return [replay.run(partial(_mean_of, one)) for one in losses]
        finally:
            self._exchange(places)

    def _exchange(self, places: Sequence[Tensor]) -> None:
        for leaf, place in zip(self._leaves, places, strict=True):
            here = leaf.clone()
            leaf.copy_(place)
            place.copy_(here)
        torch.clear_autocast_cache()  # it would hold casts of the parameters from before


def _mean_of(losses: Losses) -> Tensor:
    with torch.no_grad():
        return losses().mean(dtype=torch.float64)


def _mean(parts: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """The mean of what was found in parts of so many samples."""
    if len(parts) == 1:
        return parts[0]
    weighed = [part * (count / sum(counts)) for part, count in zip(parts, counts, strict=True)]
    return torch.stack(weighed).sum(0)
