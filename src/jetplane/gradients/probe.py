"""Finding out which entries of which activation belong to which sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import Layout, candidates, codes, guess
from .plan import Plan, Site

__all__ = ["find_layouts"]

Carry = Callable[[Callable[[Site, Tensor], Tensor | None], int], Tensor]  # rows at the sites, K -> tangents (K, B)


@dataclass(frozen=True)
class _Question:
    """Does a loss of another sample depend on the entries of ``subset`` at a site laid out like this?"""

    sites: dict[int, Layout]  # by number
    subset: Tensor  # (B,) of truth values


def find_layouts(plan: Plan, carry: Carry, width: int) -> None:
    """Prove a layout for each site, or leave it None: coupled. ``width`` tangents are carried at a time.

    First each site alone, its candidates in turn, with half of the samples and with the other half. Then all that are
    left together, with subsets that tell any two samples apart; if that fails, each of them alone.
    """
    for site in plan.sites:  # of a single sample nothing has to be told apart
        site.layout, site.coupled = guess(site.shape, 1) if plan.samples == 1 else None, False
    if plan.samples == 1 or not plan.sites:
        return
    ask = _Asker(plan, carry, width)
    _one_by_one(plan, ask)
    found = {site.number: site.layout for site in plan.sites if site.layout is not None}
    subsets = codes(plan.samples, ask.device)
    if found and not ask.together(found, subsets):
        for number, (apart, _) in ask.each(found, subsets).items():
            if not apart:
                plan.sites[number].layout, plan.sites[number].coupled = None, True
    for site in plan.sites:  # samples that a batch norm couples are told apart, and coupled all the same
        layers = [site.group.nodes[0], *(one.group.nodes[0] for one in plan.spread if one.last >= site.end)]
        site.coupled = site.coupled or any(number > min(layers) for number in plan.norms)


def _one_by_one(plan: Plan, ask: _Asker) -> None:
    halves = _halves(plan.samples, ask.device)
    left = {site.number: candidates(site.shape, plan.samples) for site in plan.sites}
    for number, layouts in left.items():
        plan.sites[number].coupled = not layouts
    while any(left.values()):
        turn = {number: layouts.pop(0) for number, layouts in left.items() if layouts}
        for number, (apart, touched) in ask.each(turn, halves).items():
            site = plan.sites[number]
            if not touched:  # no loss depends on it now, so nothing is proven: the sum of all losses is right
                left[number] = []
            elif apart:
                site.layout, left[number] = turn[number], []
            else:
                site.coupled = not left[number]


def _halves(samples: int, device: torch.device) -> Tensor:
    """A half of the samples, at random, and the other half."""
    generator = torch.Generator().manual_seed(samples)
    order = torch.randperm(samples, generator=generator, device="cpu").to(device)
    half = order < (samples + 1) // 2
    return torch.stack([half, ~half])


class _Asker:
    def __init__(self, plan: Plan, carry: Carry, width: int) -> None:
        self._plan, self._carry, self._width = plan, carry, width
        self.device = plan.sites[0].device if plan.sites else torch.device("cpu")

    def each(self, layouts: dict[int, Layout], subsets: Tensor) -> dict[int, tuple[bool, bool]]:
        """By site: whether no other sample's loss became NaN, and whether any of its own did."""
        questions = [_Question({number: layout}, subset) for number, layout in layouts.items() for subset in subsets]
        answers = self._answers(questions)
        result: dict[int, tuple[bool, bool]] = {}
        for question, (apart, touched) in zip(questions, answers, strict=True):
            number = next(iter(question.sites))
            before = result.get(number, (True, False))
            result[number] = before[0] and apart, before[1] or touched
        return result

    def together(self, layouts: dict[int, Layout], subsets: Tensor) -> bool:
        """Whether no sample's loss depends on another sample's entries at any of the sites."""
        return all(apart for apart, _ in self._answers([_Question(layouts, subset) for subset in subsets]))

    def _answers(self, questions: list[_Question]) -> list[tuple[bool, bool]]:
        answers: list[tuple[bool, bool]] = []
        for start in range(0, len(questions), self._width):
            part = questions[start : start + self._width]
            lost = self._carry(lambda site, like, part=part: _tangents(part, site, like), len(part)).isnan().any(2)  # type: ignore[misc]
            subsets = torch.stack([question.subset for question in part]).to(lost.device)
            apart, touched = ~(lost & ~subsets).any(1), lost.any(1)
            answers += list(zip(apart.tolist(), touched.tolist(), strict=True))
        return answers


def _tangents(questions: list[_Question], site: Site, like: Tensor) -> Tensor | None:
    if not any(site.number in question.sites for question in questions):
        return None
    rows = torch.zeros((len(questions), *like.shape), dtype=like.dtype, device=like.device)
    for row, question in zip(rows, questions, strict=True):
        layout = question.sites.get(site.number)
        if layout is not None:
            row.masked_fill_(layout.spread(question.subset.to(like.device), like.shape), math.nan)
    return rows
