"""Batch norm in training: samples that depend on each other by two numbers of each channel, and by nothing else.

Tangents pass with these statistics fixed, so that a sample's noise reaches its own loss alone. What is missing is added
to the scalar that multiplies the noise. With the direct part s_b of the derivative along sample b's noise,

    s_b - sum over norms n of along_nb . d_n        d_n = (sum g, sum g x^), of each channel

where g is the derivative of all losses at the norm's result, and ``along`` is linear in the noise before the norm
(:mod:`.batch_norm`). The noise behind the norm estimates g, as it does for its layers, and so d, which is the gradient
of the norm's own bias and weight. That noise is independent of the noise before, so the product is unbiased, too. The
last norm comes first: behind it there is no other, and the scalars that estimate another one's d need its own.

So noise is handed on from norm to norm, and with many of them it grows from each to the one before it, without end.
Therefore a norm's part of the scalars, p_n = along_n . d_n, is bounded where there are more than a few of them: it is
multiplied by

    lambda_n = min(1, sqrt(0.25 / (N R_n)))        R_n = mean p_n^2 / mean s^2

so that all N norms together add about a quarter to the scalars' power s^2, at any depth. What is left out, (1 - lambda)
of that part, is bias. R is that of the call itself: no state, and the bound holds for every call.

Where a control variate predicts A^T e of the derivative behind a norm (:mod:`.prediction`), d is read from what is left
of the scalars, and what A^T e says of d is added: as exact, and less noisy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..adjoints import batch_norm
from ..plan.noise_plan import NoisePlan, Site
from ..program.done import Done
from .prediction import NOTHING, NoPrediction, Prediction

__all__ = ["Statistics"]

_FEW = 2  # norms, for which d is used as it is found
_ADDED = 0.25  # of the scalars' power: what more norms may add to it, all together


class Statistics:
    """What one call's first pass, in one chunk or several, sees of the norms of a plan."""

    def __init__(self, plan: NoisePlan, prediction: Prediction | NoPrediction = NOTHING, exact: bool = False) -> None:
        self._samples = plan.total
        self._norms = plan.norms
        self._prediction = _readable(plan, prediction)
        self._bounded = not exact and len(plan.norms) > _FEW
        self._along: dict[int, list[Tensor]] = {number: [] for number in plan.norms}  # (K, B, 2C), by chunk
        self._read: dict[int, list[Tensor]] = {number: [] for number in plan.norms}  # likewise
        self._known: dict[int, Tensor] = {}  # (V, B, 2C), by norm: what d has of each number of the loss's input
        self._scalars: list[Tensor] = []  # (K, B), by chunk
        self._missing: dict[int, Tensor] = {}  # (J, B), by norm
        self._power: Tensor | None = None  # () of the scalars without the norms' part

    # -- first pass -------------------------------------------------------------------------------------------------

    def enter(self, number: int, done: Done, rows: Tensor | None, k: int) -> Tensor | None:
        """Tangents (K, B, C, ...) arrive at a norm: those behind it, its statistics fixed."""
        if rows is None:
            x = done.args[0]
            self._along[number].append(x.new_zeros((k, x.shape[0], 2 * x.shape[1])))
            return None
        self._along[number].append(batch_norm.along(done, rows))
        return batch_norm.fixed(done, rows)

    def predicted(self, site: Site, activation: Tensor) -> Tensor | None:
        """The derivative (V, *S) at a site by each number of the loss's input, as it is predicted; None if it is known
        from a chunk before, or of no use."""
        if self._prediction is None or site.number not in self._prediction.sites:
            return None
        if any(number in self._known for number, one in self._norms.items() if one is site):
            return None
        return self._prediction.columns(site, activation)

    def know(self, number: int, done: Done, rows: list[Tensor]) -> None:
        """What is predicted behind a norm, pulled back to its result, row by row."""
        self._known[number] = batch_norm.read(done, torch.stack(rows))

    def read(self, number: int, done: Done, rows: list[Tensor] | None) -> None:
        """What the noise behind a norm, pulled back to its result, row by row, says of its d."""
        if rows is None:
            self._read[number].append(torch.zeros_like(self._along[number][-1]))
        else:
            self._read[number].append(batch_norm.read(done, torch.stack(rows)))

    def leave(self, scalars: Tensor, predicted: Tensor | None) -> None:
        """The tangents of the losses (K, B, T) at the end of a pass, and what was predicted of them."""
        left = scalars.sum(2)
        if predicted is not None and self._prediction is not None:
            left = left - predicted.sum(2).to(left)
        self._scalars.append(left)

    def marks(self) -> Tensor:
        """(K, B), NaN where something of a sample has become so, on its way or at a norm, and else zero."""
        parts = [parts[-1].sum(2) for one in (self._along, self._read) for parts in one.values()]
        return 0.0 * torch.stack([part.to(parts[0]) for part in parts]).sum(0)

    def seen(self) -> list[Tensor]:
        """What is known of the tangents that were carried, (K, ...) each."""
        return [torch.cat(one[number]) for one in (self._along, self._read) for number in one] + [
            torch.cat(self._scalars)
        ]

    def see(self, parts: list[Tensor]) -> None:
        """The same of all tangents, which other processes have carried."""
        *norms, scalars = parts
        given = iter(norms)
        self._along, self._read = ({number: [next(given)] for number in one} for one in (self._along, self._read))
        self._scalars = [scalars]

    # -- between the passes -----------------------------------------------------------------------------------------

    def close(self, tangents: int) -> None:
        """All J tangents were carried."""
        direct = torch.cat(self._scalars) / (tangents * self._samples)
        self._power = direct.square().mean()
        for number in sorted(self._norms, reverse=True):
            site = self._norms[number]
            known, along = direct, torch.cat(self._along[number]).to(direct)
            missing = self.missing(site)
            if missing is not None:
                known = known + missing
            part = along @ self._sums(number, site, known) / -tangents
            self._missing[number] = self._damped(part) if self._bounded else part
        self._along, self._read, self._known, self._scalars = {}, {}, {}, []

    def _sums(self, number: int, site: Site, scalars: Tensor) -> Tensor:
        """d (2C,) of a norm, over B, by the scalars (J, B) of the noise behind it."""
        if site.layout is None:  # nothing says which sample a row of the noise belongs to
            scalars = scalars.sum(1, keepdim=True).expand_as(scalars)
        sums = (scalars.unsqueeze(2) * torch.cat(self._read[number]).to(scalars)).sum((0, 1))
        if number in self._known:
            assert self._prediction is not None
            rows = self._known[number].to(sums)  # (V, B, 2C)
            sums = sums + (self._prediction.slopes.to(sums).flatten(1).T.unsqueeze(2) * rows).sum((0, 1))
        return sums

    def _damped(self, part: Tensor) -> Tensor:
        """A norm's part (J, B) of the scalars, no larger than its share of what all norms may add to their power."""
        assert self._power is not None
        allowed = _ADDED * self._power / len(self._norms)
        power = part.square().mean()
        return part * torch.where(power > allowed, (allowed / power).sqrt(), 1.0)

    @property
    def share(self) -> Tensor:
        """(): the power of what is missing before the first norm, in units of that of the scalars without it."""
        assert self._power is not None
        return torch.stack(list(self._missing.values())).sum(0).square().mean() / self._power

    def missing(self, site: Site) -> Tensor | None:
        """(J, B): what the scalars lack for noise of a site, over J and B; None where no norm is behind it."""
        behind = [part for number, part in self._missing.items() if number > site.end]
        return torch.stack(behind).sum(0) if behind else None


def _readable(plan: NoisePlan, prediction: Prediction | NoPrediction) -> Prediction | None:
    """What is predicted, where it can be taken out of the scalars before d is read, and put back into d."""
    known = isinstance(prediction, Prediction) and all(prediction.has_columns(site) for site in plan.norms.values())
    return prediction if known else None  # type: ignore[return-value]
