"""What a part of a batch has to say of a control variate's Jacobians, before they learn from all parts at once.

Parts are those of several processes, or of one that takes them in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Lessons"]


@dataclass(eq=False)
class Lessons:
    """The sums over the samples so far, by site, in the order in which the sites were met."""

    finite: Tensor = field(default_factory=lambda: torch.ones(()))
    updates: dict[int, Tensor] = field(default_factory=dict)
    activity: dict[int, Tensor] = field(default_factory=dict)
    unexplained: dict[int, Tensor] = field(default_factory=dict)

    def begin(self, finite: Tensor) -> None:
        """The passes with tangents are done; from what is not finite nobody learns."""
        self.finite = self.finite.to(finite.device).bool() & finite

    def add(self, site: int, update: Tensor, now: Tensor | None) -> None:
        """Some tangents' part of a Jacobian's step, and how many samples have a derivative there now."""
        _add(self.updates, site, update)
        if now is not None:
            _add(self.activity, site, now)

    def weigh(self, site: int, seen: Tensor) -> None:
        """How much of a site's derivative was not predicted."""
        _add(self.unexplained, site, seen)

    def parts(self) -> list[Tensor]:
        """All of it, to be added up over the parts."""
        dtype = next((update.dtype for update in self.updates.values()), torch.float32)
        lost = (~self.finite.bool()).to(dtype).reshape(1)
        return [lost, *self.updates.values(), *self.activity.values(), *self.unexplained.values()]

    def summed(self, parts: list[Tensor]) -> Iterator[tuple[int, Tensor, Tensor | None, Tensor | None]]:
        """By site, the sums over all parts: the step, the activity, and what was not predicted."""
        given = iter(parts)
        lost = next(given)[0] > 0
        updates, activity, unexplained = (
            {site: next(given) for site in own} for own in (self.updates, self.activity, self.unexplained)
        )
        for site, update in updates.items():
            yield site, torch.where(lost.to(update.device), 0.0, update), activity.get(site), unexplained.get(site)


def _add(sums: dict[int, Tensor], site: int, part: Tensor) -> None:
    sums[site] = sums[site] + part if site in sums else part
