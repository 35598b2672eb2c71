"""Batch norm in training: samples that depend on each other by two numbers of each channel, and by nothing else.

Tangents pass with these statistics fixed, so that a sample's noise reaches its own loss alone. What is missing is added
to the scalar that multiplies the noise. With the direct part s_b of the derivative along sample b's noise,

    s_b - sum over norms n of along_nb . d_n        d_n = (sum g, sum g x^), of each channel

where g is the derivative of all losses at the norm's result, and ``along`` is linear in the noise before the norm
(:mod:`.batch_norm`). The noise behind the norm estimates g, as it does for its layers, and so d, which is the gradient
of the norm's own bias and weight. That noise is independent of the noise before, so the product is unbiased, too. The
last norm comes first: behind it there is no other, and the scalars that estimate another one's d need its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import batch_norm
from .done import Done
from .plan import Plan, Site

__all__ = ["Statistics"]


class Statistics:
    """What one call's first pass, in one chunk or several, sees of the norms of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._samples = plan.samples
        self._norms = plan.norms
        self._along: dict[int, list[Tensor]] = {number: [] for number in plan.norms}  # (K, B, 2C), by chunk
        self._read: dict[int, list[Tensor]] = {number: [] for number in plan.norms}  # likewise
        self._scalars: list[Tensor] = []  # (K, B), by chunk
        self._missing: dict[int, Tensor] = {}  # (J, B), by norm

    # -- first pass -------------------------------------------------------------------------------------------------

    def enter(self, number: int, done: Done, rows: Tensor | None, k: int) -> Tensor | None:
        """Tangents (K, B, C, ...) arrive at a norm: those behind it, its statistics fixed."""
        if rows is None:
            x = done.args[0]
            self._along[number].append(x.new_zeros((k, x.shape[0], 2 * x.shape[1])))
            return None
        self._along[number].append(batch_norm.along(done, rows))
        return batch_norm.fixed(done, rows)

    def read(self, number: int, done: Done, rows: list[Tensor] | None) -> None:
        """What the noise behind a norm, pulled back to its result, row by row, says of its d."""
        if rows is None:
            self._read[number].append(torch.zeros_like(self._along[number][-1]))
        else:
            self._read[number].append(batch_norm.read(done, torch.stack(rows)))

    def leave(self, scalars: Tensor) -> None:
        """The tangents of the losses (K, B) at the end of a pass."""
        self._scalars.append(scalars)

    def marks(self) -> Tensor:
        """(K, B), NaN where something of a sample has become so, on its way or at a norm, and else zero."""
        parts = [parts[-1].sum(2) for one in (self._along, self._read) for parts in one.values()]
        return 0.0 * torch.stack([part.to(parts[0]) for part in parts]).sum(0)

    # -- between the passes -----------------------------------------------------------------------------------------

    def close(self, tangents: int) -> None:
        """All J tangents were carried."""
        direct = torch.cat(self._scalars) / (tangents * self._samples)
        for number in sorted(self._norms, reverse=True):
            site = self._norms[number]
            known, read, along = (
                part.to(direct) for part in (direct, torch.cat(self._read[number]), torch.cat(self._along[number]))
            )
            missing = self.missing(site)
            if missing is not None:
                known = known + missing
            if site.layout is None:  # nothing says which sample a row of the noise belongs to
                known = known.sum(1, keepdim=True).expand_as(known)
            sums = (known.unsqueeze(2) * read).sum((0, 1))
            self._missing[number] = along @ sums / -tangents
        self._along, self._read, self._scalars = {}, {}, []

    def missing(self, site: Site) -> Tensor | None:
        """(J, B): what the scalars lack for noise of a site, over J and B; None where no norm is behind it."""
        behind = [part for number, part in self._missing.items() if number > site.end]
        return torch.stack(behind).sum(0) if behind else None
