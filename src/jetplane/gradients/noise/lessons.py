"""What one process has to say of a control variate's Jacobians, before those of all processes learn from it alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Lessons"]


@dataclass(eq=False)
class Lessons:
    """The sums over this process's samples, by site, in the order in which the sites were met."""

    rate: Tensor = field(default_factory=lambda: torch.zeros(()))  # of the activity, the same everywhere
    finite: Tensor = field(default_factory=lambda: torch.ones(()))
    updates: dict[int, Tensor] = field(default_factory=dict)
    activity: dict[int, Tensor] = field(default_factory=dict)
    unexplained: dict[int, Tensor] = field(default_factory=dict)

    def begin(self, rate: Tensor, finite: Tensor) -> None:
        """The passes with tangents are done; from what is not finite nobody learns."""
        self.rate, self.finite = rate, finite

    def add(self, site: int, update: Tensor, now: Tensor | None) -> None:
        """Some tangents' part of a Jacobian's step, and how many samples have a derivative there now."""
        self.updates[site] = self.updates[site] + update if site in self.updates else update
        if now is not None:
            self.activity[site] = now

    def weigh(self, site: int, seen: Tensor) -> None:
        """How much of a site's derivative was not predicted."""
        self.unexplained[site] = seen

    def parts(self) -> list[Tensor]:
        """All of it, to be added up over the processes."""
        lost = (~self.finite.bool()).to(self.rate.dtype).reshape(1)
        return [lost, *self.updates.values(), *self.activity.values(), *self.unexplained.values()]

    def summed(self, parts: list[Tensor]) -> Iterator[tuple[int, Tensor, Tensor | None, Tensor | None]]:
        """By site, the sums over all processes: the step, the activity, and what was not predicted."""
        given = iter(parts)
        lost = next(given)[0] > 0
        updates, activity, unexplained = (
            {site: next(given) for site in own} for own in (self.updates, self.activity, self.unexplained)
        )
        for site, update in updates.items():
            yield site, torch.where(lost.to(update.device), 0.0, update), activity.get(site), unexplained.get(site)
