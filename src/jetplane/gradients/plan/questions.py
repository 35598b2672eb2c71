"""Questions about what depends on what, asked by tangents that are NaN: what depends on them becomes NaN too."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..program.layout import Grid, Layout
from .noise_plan import Site

__all__ = ["Carry", "Question", "ask", "half"]

log = logging.getLogger("jetplane")

Carry = Callable[[Callable[[Site, Tensor], Tensor | None], int], Tensor]  # rows at the sites, K -> tangents (K, ...)


@dataclass(frozen=True)
class Question:
    """What becomes NaN if at these sites the entries of some samples, or of some tokens, are?"""

    layouts: dict[int, Layout | None]  # by site, of what is chosen; None for all entries
    chosen: Tensor  # (B,) or (T,), of truth values
    last: bool = False  # of what is chosen, that which is last along every axis


def ask(questions: list[Question], carry: Carry, width: int) -> Iterator[tuple[Question, Tensor]]:
    """With each question: what became NaN, in any number of the last axis. ``width`` are carried at a time."""
    for start in range(0, len(questions), width):
        log.info("planning: questions %d to %d of %d", start + 1, min(start + width, len(questions)), len(questions))
        part = questions[start : start + width]
        yield from zip(part, carry(partial(_tangents, part), len(part)).isnan().any(-1), strict=True)


def half(count: int, device: torch.device) -> Tensor:
    """A half of so many, at random and always the same, as truth values.

    Example:
        >>> int(half(5, torch.device("cpu")).sum())
        3
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count), device="cpu").to(device)
    return order < (count + 1) // 2


def _tangents(questions: list[Question], site: Site, like: Tensor) -> Tensor | None:
    asking = [(number, question) for number, question in enumerate(questions) if site.number in question.layouts]
    if not asking:
        return None
    rows = torch.zeros((len(questions), *like.shape), dtype=like.dtype, device=like.device)
    for number, question in asking:
        _lose(rows[number], question.layouts[site.number], question)
    return rows


def _lose(row: Tensor, layout: Layout | None, question: Question) -> None:
    """Let what is chosen of an activation be NaN."""
    if layout is None:
        row.fill_(math.nan)
        return
    chosen = question.chosen.to(row.device)
    if question.last:
        view, (place, _) = Grid(layout).digits(row.shape, len(chosen))
        ends = [slice(None) if axis == place else -1 for axis in range(len(view))]
        row.view(view)[tuple(ends)] = torch.where(chosen, math.nan, 0.0).to(row.dtype)
    else:
        row.masked_fill_(layout.spread(chosen, row.shape), math.nan)
