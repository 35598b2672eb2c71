"""Finding out which tokens of the loss's input a token of an activation can reach.

The losses' tangents are sums over the tokens of their input z, d loss_b = sum_t e_bt . dz_bt with e exact. So noise in
what reaches some tokens of z is multiplied by their part of that sum alone. What reaches what is proven as layouts are,
by tangents that are NaN: behind the last attention a token reaches itself, in a causal model itself and later ones, and
what one step of a recurrent network has made those from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ..program.layout import Grid, Layout, codes, guess, within
from .noise_plan import NoisePlan, Site, Tokens
from .questions import Question, ask, half

__all__ = ["find_tokens"]

# tokens, rows at the sites, K -> tangents of z by sample and token (K, B, T, V)
Look = Callable[[Tokens, Callable[[Site, Tensor], Tensor | None], int], Tensor]

_THRESHOLDS = 15  # of a causal model: tokens between two of them are one block
_GUESSES = 6  # layouts of tokens that are tried at a site
_OWN, _CAUSAL = "own", "causal"


def find_tokens(plan: NoisePlan, look: Look, width: int) -> None:
    """Find the tokens of z, and what each site reaches of them. ``width`` tangents are carried at a time."""
    known, kinds = plan.tokens, {site.number: _kind(site) for site in plan.sites}
    kept = {site.number: site.tokens for site in plan.sites}
    _forget(plan)
    for tokens in _guesses(plan):
        finder = _Finder(plan, tokens, look, width)
        again = known is not None and known.grid == tokens.grid
        if finder.find(kept if again else {}, kinds if again else {}):
            plan.tokens = tokens
            return
        _forget(plan)


def _forget(plan: NoisePlan) -> None:
    plan.tokens = None
    for site in plan.sites:
        site.tokens = site.reach = None


def _kind(site: Site) -> str | None:
    if site.tokens is None or site.reach is None:
        return None
    return _OWN if bool((site.reach == torch.eye(len(site.reach), device=site.reach.device)).all()) else _CAUSAL


def _kind_of(half_apart: bool, other_apart: bool, later_apart: bool) -> str | None:
    """What the tokens reach, by what a half of them, the other half, and the later half do."""
    if half_apart and other_apart:
        return _OWN
    return _CAUSAL if later_apart else None


def _guesses(plan: NoisePlan) -> Iterator[Tokens]:
    """Where the tokens of the loss's input may lie, if it is a single one."""
    if plan.tail is not None and len(plan.tail.inputs) == 1 and plan.sites:
        ((node, shape),) = plan.tail.inputs.items()
        layout = guess(shape, plan.samples)
        if layout is not None:
            yield from _tokens(node, shape, plan.samples, layout)


def _tokens(node: int, shape: torch.Size, samples: int, layout: Layout) -> Iterator[Tokens]:
    sizes = [shape[axis] // (samples if axis == layout.axis else 1) for axis in range(len(shape))]
    for axis in sorted(range(len(shape)), key=lambda axis: axis != layout.axis):
        for other in within(shape, layout, samples, sizes[axis]) if sizes[axis] > 1 else ():
            if other.axis == axis:
                yield Tokens(sizes[axis], Grid(layout, other), node)


class _Finder:
    def __init__(self, plan: NoisePlan, tokens: Tokens, look: Look, width: int) -> None:
        self._plan, self._tokens, self._look, self._width = plan, tokens, look, width
        self._device = plan.sites[0].device
        self._sites = [site for site in plan.sites if site.layout is not None]

    def find(self, kept: dict[int, Layout | None], kinds: dict[int, str | None]) -> bool:
        """Whether there is a site that does not reach all tokens; what was found before is only proven again."""
        self._sites = self._told_apart(self._sites)
        found = self._still(kept, kinds)
        left = self._not_surely_all([site for site in self._sites if site.number not in found])
        left = self._not_all(left)
        found |= self._new(left) if left else {}
        for number, (layout, kind) in found.items():
            site = self._plan.sites[number]
            site.tokens, site.reach = layout, self._reach(kind).to(site.device)
        return any(site.reach is not None for site in self._sites)

    def _still(self, kept: dict[int, Layout | None], kinds: dict[int, str | None]) -> dict[int, tuple[Layout, str]]:
        """What was found before, if all of it can be proven again."""
        found: dict[int, tuple[Layout, str]] = {}
        for site in self._sites:
            layout, kind = kept.get(site.number), kinds.get(site.number)
            if layout is not None and kind is not None:
                found[site.number] = layout, kind
        return found if self._proven(found) else {}

    def _new(self, sites: list[Site]) -> dict[int, tuple[Layout, str]]:
        """What is found now, and can be proven: together, or else one by one."""
        new = self._searched(sites)
        if not new or self._proven(new):
            return new
        return {number: one for number, one in new.items() if self._proven({number: one})}

    # -- one thing after the other ----------------------------------------------------------------------------------

    def _told_apart(self, sites: list[Site]) -> list[Site]:
        """Those whose samples reach no other sample of z, as they reach no other's loss."""
        if self._plan.samples == 1 or not sites:
            return sites
        subsets = codes(self._plan.samples, self._device)
        if self._all_apart({site.number: site.layout for site in sites}, subsets, samples=True):
            return sites
        return [site for site in sites if self._all_apart({site.number: site.layout}, subsets, samples=True)]

    def _searched(self, sites: list[Site]) -> dict[int, tuple[Layout, str]]:
        """Layouts of the tokens that two halves of them, or the later ones, do not speak against."""
        left = {site.number: self._layouts(site) for site in sites}
        found: dict[int, tuple[Layout, str]] = {}
        while any(left.values()):
            turn = {number: layouts.pop(0) for number, layouts in left.items() if layouts}
            for number, kind in self._tried(turn).items():
                found[number], left[number] = (turn[number], kind), []
        return found

    def _tried(self, turn: dict[int, Layout]) -> dict[int, str]:
        """By site: what its tokens reach with these layouts, where that is not all."""
        some = half(self._tokens.count, self._device)
        later = torch.arange(self._tokens.count, device=self._device) >= self._tokens.count // 2
        asked = (some, ~some, later)
        questions = [Question({number: layout}, chosen) for number, layout in turn.items() for chosen in asked]
        answers = iter([self._is_apart(lost, question.chosen) for question, lost in self._asked(questions)])
        kinds = {number: _kind_of(next(answers), next(answers), next(answers)) for number in turn}
        return {number: kind for number, kind in kinds.items() if kind is not None}

    def _layouts(self, site: Site) -> list[Layout]:
        assert site.layout is not None
        return within(site.shape, site.layout, self._plan.samples, self._tokens.count)[:_GUESSES]

    def _proven(self, found: dict[int, tuple[Layout, str]]) -> bool:
        """Whether all of these sites reach no token that they should not."""
        for kind, subsets in ((_OWN, codes(self._tokens.count, self._device)), (_CAUSAL, self._later())):
            layouts: dict[int, Layout | None] = {n: layout for n, (layout, one) in found.items() if one == kind}
            if layouts and not self._all_apart(layouts, subsets, samples=False):
                return False
        return True

    def _not_surely_all(self, sites: list[Site]) -> list[Site]:
        """The sites without those where a sample's last entry reaches all tokens.

        Whatever the layout, it is an entry of the last token, which then reaches the first one.
        """
        everyone = torch.ones(self._plan.samples, dtype=torch.bool, device=self._device)
        asked = self._asked([Question({site.number: site.layout}, everyone, last=True) for site in sites])
        return [
            self._plan.sites[next(iter(question.layouts))] for question, lost in asked if not bool(lost.all(-1).any())
        ]

    def _not_all(self, sites: list[Site]) -> list[Site]:
        """Find which tokens all of a site reaches, as for one step of a recurrent network; the sites that reach all."""
        everything = torch.ones(1, dtype=torch.bool, device=self._device)
        others = []
        for question, lost in self._asked([Question({site.number: None}, everything) for site in sites]):
            site = self._plan.sites[next(iter(question.layouts))]
            reached = lost.any(0)
            if bool(reached.all()):
                others.append(site)
            elif bool(reached.any()):  # nothing is proven where there is no derivative now
                site.reach = reached.to(site.device, torch.float32).unsqueeze(0)
        return others

    def _later(self) -> Tensor:
        """(thresholds, T): the tokens from a threshold on."""
        place = torch.arange(self._tokens.count, device=self._device)
        return place >= self._starts()[1:].unsqueeze(1)

    def _starts(self) -> Tensor:
        """The first tokens of the blocks."""
        count = self._tokens.count
        blocks = min(count, _THRESHOLDS + 1)
        return torch.arange(blocks, device=self._device) * count // blocks

    def _reach(self, kind: str) -> Tensor:
        place = torch.arange(self._tokens.count, device=self._device)
        if kind == _OWN:
            return torch.eye(len(place), device=self._device)
        starts = self._starts()
        first = starts[torch.searchsorted(starts, place, right=True) - 1]
        return (place >= first.unsqueeze(1)).to(torch.float32)

    # -- asking -----------------------------------------------------------------------------------------------------

    def _all_apart(self, layouts: dict[int, Layout | None], subsets: Tensor, samples: bool) -> bool:
        asked = self._asked([Question(layouts, subset) for subset in subsets])
        return all(self._is_apart(lost.T if samples else lost, question.chosen) for question, lost in asked)

    def _is_apart(self, lost: Tensor, chosen: Tensor) -> bool:
        """Whether none was lost that was not chosen, and some was: (..., those)."""
        return bool(lost.any()) and not bool((lost & ~chosen.to(lost.device)).any())

    def _asked(self, questions: list[Question]) -> Iterator[tuple[Question, Tensor]]:
        """With each question: what became NaN (B, T)."""
        return ask(questions, partial(self._look, self._tokens), self._width)
