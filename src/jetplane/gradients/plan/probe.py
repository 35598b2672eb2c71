"""Finding out which entries of which activation belong to which sample."""

from __future__ import annotations

import torch
from torch import Tensor

from ..program.layout import Layout, candidates, codes, guess
from .noise_plan import NoisePlan, Site
from .questions import Carry, Question, ask, half

__all__ = ["find_layouts"]


def find_layouts(plan: NoisePlan, carry: Carry, width: int) -> bool:
    """Prove a layout for each site, or leave it None: coupled. ``width`` tangents are carried at a time.

    First each site alone, its candidates in turn, with half of the samples and with the other half. Then all that are
    left together, with subsets that tell any two samples apart; if that fails, each of them alone. False, and nothing
    is known of any site, where losses are NaN whatever the tangents are.
    """
    for site in plan.sites:  # of a single sample nothing has to be told apart
        site.layout, site.coupled = guess(site.shape, 1) if plan.samples == 1 else None, False
    if plan.samples == 1 or not plan.sites:
        return True
    asker = _Asker(plan, carry, width)
    _one_by_one(plan, asker)
    _all_together(plan, asker)
    if any(site.coupled for site in plan.sites) and asker.loses_anyway():
        for site in plan.sites:
            site.layout, site.coupled = None, False
        return False
    for site in plan.sites:  # samples that a batch norm couples are told apart, and coupled all the same
        site.coupled = site.coupled or _is_normalised(plan, site)
    return True


def _all_together(plan: NoisePlan, asker: _Asker) -> None:
    found = {site.number: site.layout for site in plan.sites if site.layout is not None}
    subsets = codes(plan.samples, asker.device)
    if not found or asker.together(found, subsets):
        return
    for number, (apart, _) in asker.each(found, subsets).items():
        if not apart:
            plan.sites[number].layout, plan.sites[number].coupled = None, True


def _is_normalised(plan: NoisePlan, site: Site) -> bool:
    """Whether a batch norm stands behind a layer of a site."""
    layers = [site.group.nodes[0], *(one.group.nodes[0] for one in plan.spread if one.last >= site.end)]
    return any(number > min(layers) for number in plan.norms)


def _one_by_one(plan: NoisePlan, asker: _Asker) -> None:
    first = half(plan.samples, asker.device)
    halves = torch.stack([first, ~first])
    left = {site.number: candidates(site.shape, plan.samples) for site in plan.sites}
    for number, layouts in left.items():
        plan.sites[number].coupled = not layouts
    while any(left.values()):
        turn = {number: layouts.pop(0) for number, layouts in left.items() if layouts}
        for number, (apart, touched) in asker.each(turn, halves).items():
            site = plan.sites[number]
            if not touched:  # no loss depends on it now, so nothing is proven: the sum of all losses is right
                left[number] = []
            elif apart:
                site.layout, left[number] = turn[number], []
            else:
                site.coupled = not left[number]


class _Asker:
    def __init__(self, plan: NoisePlan, carry: Carry, width: int) -> None:
        self._plan, self._carry, self._width = plan, carry, width
        self.device = plan.sites[0].device if plan.sites else torch.device("cpu")

    def each(self, layouts: dict[int, Layout], subsets: Tensor) -> dict[int, tuple[bool, bool]]:
        """By site: whether no other sample's loss became NaN, and whether any of its own did."""
        answers = self._answers([Question({n: layout}, one) for n, layout in layouts.items() for one in subsets])
        by_site = [answers[start : start + len(subsets)] for start in range(0, len(answers), len(subsets))]
        return {
            number: (all(apart for apart, _ in those), any(touched for _, touched in those))
            for number, those in zip(layouts, by_site, strict=True)
        }

    def together(self, layouts: dict[int, Layout], subsets: Tensor) -> bool:
        """Whether no sample's loss depends on another sample's entries at any of the sites."""
        return all(apart for apart, _ in self._answers([Question({**layouts}, subset) for subset in subsets]))

    def loses_anyway(self) -> bool:
        """Whether a loss becomes NaN where no tangent is."""
        samples, nobody = self._plan.samples, torch.zeros(self._plan.samples, dtype=torch.bool, device=self.device)
        layouts = {site.number: each for site in self._plan.sites for each in candidates(site.shape, samples)[:1]}
        return bool(layouts) and not self.together({**layouts}, nobody.unsqueeze(0))

    def _answers(self, questions: list[Question]) -> list[tuple[bool, bool]]:
        lost = torch.stack([lost for _, lost in ask(questions, self._carry, self._width)])  # (questions, B)
        chosen = torch.stack([question.chosen for question in questions]).to(lost.device)
        apart, touched = ~(lost & ~chosen).any(1), lost.any(1)
        return list(zip(apart.tolist(), touched.tolist(), strict=True))
