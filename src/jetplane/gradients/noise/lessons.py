"""What a part of a batch has to say of a control variate's Jacobians, before they learn from all parts at once.

Parts are those of several processes, or of one that takes them in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .learned import Learned

__all__ = ["Lessons", "Sums"]


@dataclass(eq=False)
class Lessons:
    """The sums over the samples so far, by site, in the order in which the sites were met."""

    finite: Tensor | None = None  # (), of all that was seen
    updates: dict[int, Tensor] = field(default_factory=dict)
    activity: dict[int, Tensor] = field(default_factory=dict)
    powers: dict[int, Tensor] = field(default_factory=dict)  # (2,), of what was not predicted and of what was

    def begin(self, finite: Tensor) -> None:
        """The passes with tangents are done; from what is not finite nobody learns."""
        self.finite = finite if self.finite is None else self.finite & finite

    def add(self, site: int, update: Tensor, now: Tensor | None) -> None:
        """Some tangents' part of a Jacobian's step, and how many samples have a derivative there now."""
        _add(self.updates, site, update)
        if now is not None:
            _add(self.activity, site, now)

    def weigh(self, site: int, seen: Tensor) -> None:
        """How much of a site's derivative was not predicted, and how much was, (2,)."""
        _add(self.powers, site, seen)

    @property
    def kinds(self) -> tuple[dict[int, Tensor], ...]:
        """The steps, the activity, and what was not predicted and what was."""
        return self.updates, self.activity, self.powers

    def parts(self) -> list[Tensor]:
        """All of it, to be added up over the parts."""
        assert self.finite is not None
        dtype = next((update.dtype for update in self.updates.values()), torch.float32)
        lost = (~self.finite).to(dtype).reshape(1)
        return [lost, *(tensor for kind in self.kinds for tensor in kind.values())]

    def summed(self, parts: list[Tensor]) -> Iterator[tuple[int, Tensor, Tensor | None, Tensor | None]]:
        """By site, the sums over all parts: the step, the activity, and what was not predicted and what was."""
        given = iter(parts)
        lost = next(given)[0] > 0
        updates, activity, powers = ({site: next(given) for site in kind} for kind in self.kinds)
        for site, update in updates.items():
            yield site, torch.where(lost.to(update.device), 0.0, update), activity.get(site), powers.get(site)


class Sums:
    """Lessons of parts in tensors of their own, which stay from one graph to the next."""

    def __init__(self, learned: Learned) -> None:
        lost = torch.zeros(1, dtype=learned.dtype, device=learned.calls.device)
        self._sites = list(learned.jacobians)
        kinds = learned.jacobians, learned.activity
        self.tensors = [lost, *(torch.zeros_like(tensor) for kind in kinds for tensor in kind.values())]
        self.tensors += [tensor.new_zeros(2) for tensor in learned.unexplained.values()]
        self._met: tuple[list[int], ...] = ([], [], [])  # sites, of each kind

    def add(self, tensors: Sequence[Tensor], lessons: Lessons) -> None:
        """Add those of one part to twins of the tensors."""
        lost, *found = lessons.parts()
        tensors[0].add_(lost.to(tensors[0]))
        self._met = tuple(map(list, lessons.kinds))
        for place, part in zip(self._places(), found, strict=True):
            tensors[place].add_(part)

    def put(self, tensors: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Let the twins be what :meth:`Lessons.parts` of them has become."""
        lost, *found = parts
        tensors[0].copy_(lost)
        for place, part in zip(self._places(), found, strict=True):
            tensors[place].copy_(part)

    def lessons(self, tensors: Sequence[Tensor]) -> Lessons:
        """What was added to them."""
        places = iter(self._places())
        kinds = [{site: tensors[next(places)] for site in met} for met in self._met]
        return Lessons(tensors[0][0] == 0, *kinds)

    def _places(self) -> list[int]:
        """Among the tensors, of what is met."""
        count = len(self._sites)
        return [1 + kind * count + self._sites.index(site) for kind, met in enumerate(self._met) for site in met]


def _add(sums: dict[int, Tensor], site: int, part: Tensor) -> None:
    sums[site] = sums[site] + part if site in sums else part
