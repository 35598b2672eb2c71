"""The noise of some samples of a batch: what they have when the whole batch is there.

An activation (*S) with B samples along an axis is (L, B, R) in memory, and that of all N samples (L, N, R). So sample b
of a part that begins at ``offset`` has the numbers of sample offset + b: a function of it and the place within it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..plan.noise_plan import NoisePlan
from .signs import Noise

__all__ = ["Sharded"]


class Sharded:
    """The noise of the samples from ``offset`` on, of ``total``, of a plan's sites. In a trace it is a tensor ().

    Where a layout is not known, samples are coupled: the part is then a stretch of one long row that no other part has.
    """

    def __init__(self, noise: Noise, plan: NoisePlan, offset: int | Tensor, total: int) -> None:
        self._noise, self._plan = noise, plan
        self._offset, self._total = offset, total

    def rows(self, site: int, start: int, stop: int, like: Tensor) -> Tensor:
        if site >= len(self._plan.sites):  # what is drawn for the part by itself
            return self._stretch(site, start, stop, like, self._offset * like.numel())
        layout, samples = self._plan.sites[site].layout, self._plan.samples
        if layout is None:
            before, each = 1, -(-like.numel() // samples)
            return self._stretch(site, start, stop, like, self._offset * each)
        outer = like.shape[layout.axis] // (samples * layout.inner)
        before = math.prod(like.shape[: layout.axis]) * outer
        each = like.numel() // (before * samples)
        if before == 1:
            return self._stretch(site, start, stop, like, self._offset * each)
        everything = like.new_empty(()).expand(before, self._total, each)
        rows = self._noise.rows(site, start, stop, everything)
        return _some(rows, 2, self._offset, samples).reshape(stop - start, *like.shape)

    def _stretch(self, site: int, start: int, stop: int, like: Tensor, first: int | Tensor) -> Tensor:
        """As many numbers as ``like`` has, from the ``first`` on."""
        part: Any = getattr(self._noise, "part", None)
        if part is not None:
            found: Tensor = part(site, start, stop, like, first)
            return found
        # how long the whole row is, no tensor says
        end = (
            -(-like.numel() // self._plan.samples) * self._total if isinstance(first, Tensor) else first + like.numel()
        )
        rows = self._noise.rows(site, start, stop, like.new_empty(()).expand(end))
        return _some(rows, 1, first, like.numel()).reshape(stop - start, *like.shape)


def _some(rows: Tensor, axis: int, first: int | Tensor, count: int) -> Tensor:
    """The entries of an axis from the ``first`` on."""
    if isinstance(first, Tensor):
        return rows.index_select(axis, first + torch.arange(count, device=rows.device))
    return rows.narrow(axis, first, count)
