"""The control variate of one call: what the noise will do to the loss's input, by Jacobians learned before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..plan.noise_plan import NoisePlan, Site
from ..program.layout import Grid
from .balance import doubt, lengths, unpredicted
from .learned import Form, Learned
from .lessons import Lessons
from .readout import Readout

__all__ = ["NOTHING", "NoPrediction", "Prediction"]

_RATE = 0.1  # of learning, once there were some calls: it has to follow the weights
_SLOWLY = 0.02  # likewise of what is not predicted, which is a noisy number
_SETTLED = 20  # calls before noise is balanced
_FEW = 32  # numbers of z, to be pulled back one by one
_RARE = 0.01  # share of samples below which a unit's Jacobian is learned more slowly


class Prediction:
    """Both passes tell it what they do."""

    def __init__(self, plan: NoisePlan, readout: Readout, learned: Learned, samples: int) -> None:
        self._learned, self._readout = learned, readout
        self._samples, self._batch, self._total = samples, plan.samples, plan.total
        self.lessons: Lessons | None = None  # where other processes have some of the samples
        self.sites: dict[int, Grid] = {}  # that take part
        for number, form in learned.forms.items():
            site = plan.sites[number]
            fits = form.here == (1 if site.tokens is None else readout.count) and form.tokens == readout.count
            if site.layout is not None and fits:
                learned.start(number)
                self.sites[number] = Grid(site.layout, site.tokens)
        self._shares = {number: _share(plan.sites[number], learned.forms[number]) for number in self.sites}
        self._predicted: Tensor | None = None  # (K, B, T, V), of the tangents that are carried now
        self._residuals: list[Tensor] = []  # (K, B, T, V), of each chunk
        self._lesson: Tensor | None = None  # (J, B, T, V), residuals times the rate of learning
        self._rate: Tensor | None = None  # of the activity
        self._slopes: Tensor | None = None  # e / B (B, T, V)
        self._lengths = self._balanced(plan.sites)

    def _balanced(self, sites: Sequence[Site]) -> dict[int, Tensor]:
        """By site: the length of its noise, (). From calls before this one, so that the estimate stays unbiased."""
        if not self.sites:
            return {}
        learned, calls = self._learned, self._learned.calls
        unexplained, explained = (
            torch.stack([kind[number].to(calls.device) for number in self.sites])
            for kind in (learned.unexplained, learned.explained)
        )
        numbers = [learned.activity[number].sum() * _met(sites[number]) ** 2 for number in self.sites]
        averaged = calls.clamp(1, round(2 / _SLOWLY) - 1)  # as many of equal weight as there are in so slow a mean
        off = doubt(torch.stack([one.to(calls.device) for one in numbers]), self._samples, self._total, averaged)
        found = torch.where(calls >= _SETTLED, lengths(unexplained, explained, off), 1.0)
        return {number: length.to(learned.devices[number]) for number, length in zip(self.sites, found, strict=True)}

    @property
    def held(self) -> int:
        """How many bytes it needs beside what the passes hold."""
        matrix = max(form.numbers for form in self._learned.forms.values())
        carried = self._samples * self._batch * self._readout.count * self._readout.width
        return (2 * matrix + 3 * carried) * self._learned.dtype.itemsize

    def length(self, site: Site) -> Tensor | None:
        """That of a site's noise, (); None for 1."""
        return self._lengths.get(site.number)

    def has_columns(self, site: Site) -> bool:
        """Whether `columns` of a site are few enough; also where it takes no part."""
        form = self._learned.forms.get(site.number)
        return site.number not in self.sites or (form is not None and not form.blocks and form.shape[0] <= _FEW)

    def columns(self, site: Site, activation: Tensor) -> Tensor:
        """The predicted derivative (V, *S) of each number of z by an activation: `restored`, before e is known."""
        form, matrix = self._learned.forms[site.number], self._jacobian(site)
        grid = self.sites[site.number]
        rows = [row.reshape(1, form.here, form.size).expand(self._batch, -1, -1) for row in matrix]
        return torch.stack([grid.join(row, activation.shape) for row in rows]).to(activation.dtype)

    @property
    def slopes(self) -> Tensor:
        """e / B (B, T, V), where B is the whole batch."""
        return self._readout.slopes / self._total

    # -- first pass -------------------------------------------------------------------------------------------------

    def carry(self, site: Site, rows: Tensor) -> None:
        """Noise ``rows`` (K, *S) enters at a site."""
        if site.number in self.sites:
            matrix, noise = self._jacobian(site), self._split(site, rows)
            if matrix.ndim == 2:
                part = noise.flatten(2) @ matrix.T
            else:  # token by token
                part = noise.movedim(2, 0).flatten(1, 2) @ matrix.mT
                part = part.unflatten(1, noise.shape[:2]).movedim(0, 2)
            part = part.reshape(*noise.shape[:2], self._readout.count, -1)
            if self._predicted is None:
                self._predicted = part
            else:
                self._predicted = self._predicted + part.to(self._predicted.device)

    def close(self, tangents: Tensor) -> Tensor:
        """What was predicted of the tangents (K, B, T, V) that the loss's input has."""
        predicted = self._predicted
        assert predicted is not None
        self._predicted = None
        self._residuals.append(tangents.to(predicted) - predicted)
        return predicted.to(tangents)

    def seen(self) -> list[Tensor]:
        """What is known of the tangents that were carried, (K, ...) each."""
        return [torch.cat(self._residuals)] if self._residuals else []

    def see(self, parts: list[Tensor]) -> None:
        """The same of all tangents, which other processes have carried."""
        self._residuals = parts

    # -- second pass ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """All tangents were carried."""
        calls, count = self._learned.calls + 1, self._samples * self._total
        residuals = torch.cat(self._residuals) if len(self._residuals) > 1 else self._residuals[0]
        if self.lessons is None:
            self._learned.calls += 1
        self._rate = (1 / calls.to(residuals)).clamp_(min=_RATE)
        # With a step c / (1 + ratio), for this many numbers of noise to a product, the expected error shrinks by the
        # factor 1 - c (2 - c) / (1 + ratio), and c / (2 - c) of what no Jacobian predicts is added to it in the end. A
        # half of the fastest step is nearly as fast, and has a third of that.
        alive = [
            self._learned.activity[number].sum().to(residuals.device) * share for number, share in self._shares.items()
        ]
        ratio = torch.stack(alive).sum() / count
        rate = torch.minimum(self._rate, 0.5 / (1 + ratio))
        finite = residuals.isfinite().all()  # else nothing is to be learned from them
        if self.lessons is not None:
            self.lessons.begin(finite)
        self._lesson = torch.where(finite, residuals, 0.0).mul_(rate / count)
        self._residuals = []
        self._slopes = self.slopes

    def wait(self, hold_back: Callable[[Tensor], None]) -> None:
        """What is restored from here on waits for what was done, which a compiler would not know."""
        if self._slopes is not None:
            hold_back(self._slopes)

    def restored(self, site: Site, activation: Tensor) -> Tensor | None:
        """A^T e / B at an activation: the derivative that the scalars lack; None where they lack nothing."""
        if site.number not in self.sites:
            return None
        assert self._slopes is not None
        matrix, form = self._jacobian(site), self._learned.forms[site.number]
        slopes = self._slopes.to(matrix)
        if matrix.ndim == 2:
            numbers = (slopes.flatten(1) @ matrix).reshape(self._batch, form.here, form.size)
        else:
            numbers = (slopes.movedim(1, 0) @ matrix).movedim(0, 1)
        return self.sites[site.number].join(numbers, activation.shape).to(activation.dtype)

    def learn(self, site: Site, rows: Tensor, alive: Tensor | None, start: int) -> None:
        """Improve a site's Jacobian, which was used, from tangents ``start`` on.

        ``alive`` (*S) is what they were multiplied by: zero where there is no derivative, else how long noise is there.
        """
        if site.number not in self.sites:
            return
        assert self._lesson is not None and self._rate is not None
        matrix, activity = self._learned.jacobians[site.number], self._learned.activity[site.number]
        now = None if alive is None else self._alive_now(site, alive)
        if alive is not None:
            rows = rows * alive
        if now is not None and self.lessons is None:
            if start == 0:
                activity += (now - activity) * self._rate.to(activity.device)
            activity = torch.maximum(activity, now)  # units that come to life all at once would be learned too fast
        lesson = self._lesson[start : start + rows.shape[0]].to(matrix)
        noise, form = self._split(site, rows), self._learned.forms[site.number]
        if matrix.ndim == 2:
            update = lesson.flatten(2).flatten(0, 1).T @ noise.flatten(2).flatten(0, 1)
            update = _within_reach(site, form, update)
        else:
            update = lesson.flatten(0, 1).movedim(1, 0).mT @ noise.flatten(0, 1).movedim(1, 0)
            update = update.mean(0, keepdim=True) if form.blocks == 1 else update
        if self.lessons is not None:
            self.lessons.add(site.number, update, now if start == 0 else None)
            return
        self._improve(site.number, update, activity)

    def _alive_now(self, site: Site, alive: Tensor) -> Tensor:
        """The share of all samples with a derivative, (C n,), or this process's part of it."""
        weights = self._weights(site, alive)
        return (weights.mean(0) if self.lessons is None else weights.sum(0) / self._total).flatten()

    def _improve(self, number: int, update: Tensor, activity: Tensor) -> None:
        """Add what was found to a site's Jacobian."""
        form = self._learned.forms[number]
        if form.blocks:
            activity = activity.reshape(form.here, 1, form.size)
            activity = activity.mean(0, keepdim=True) if form.blocks == 1 else activity
        self._learned.jacobians[number] += update.div_((activity + _RARE) * self._lengths[number])

    def settle(self, parts: list[Tensor]) -> None:
        """Learn from what all parts of a batch have found: the sums of what ``lessons.parts()`` are in each."""
        assert self.lessons is not None
        self.count()
        rate = (1 / self._learned.calls.to(self._learned.dtype)).clamp_(min=_RATE)
        for number, update, now, seen in self.lessons.summed(parts):
            activity = self._learned.activity[number]
            if now is not None:
                activity += (now - activity) * rate.to(activity)
                activity = torch.maximum(activity, now)
            self._improve(number, update, activity)
            if seen is not None:
                self._remember(number, seen)

    def count(self) -> None:
        """A call is over, of which there are lessons, or nothing is to be learned."""
        self._learned.calls += 1

    def weigh(self, site: Site, found: Tensor, known: Tensor | None, numbers: Tensor, alive: Tensor | None) -> None:
        """Keep in mind how much of a site's derivative was not predicted (see `unpredicted`), and how much was."""
        if site.number not in self.sites or self._samples == 1:  # there are no two tangents to compare
            return
        assert known is not None
        if alive is None:
            active = numbers.new_full(numbers.shape[1:], float(self._learned.forms[site.number].size))
        else:
            active = self._weights(site, alive).sum(2)
            found, known = found * alive, known * alive
        missed = unpredicted(found, numbers, active) / self._lengths[site.number].square()
        taken = known.to(self._learned.dtype).square().sum() * self._total
        seen = torch.stack([missed.to(taken) * (self._total / self._batch), taken])
        if self.lessons is not None:
            self.lessons.weigh(site.number, seen)
            return
        self._remember(site.number, seen)

    def _remember(self, number: int, seen: Tensor) -> None:
        for known, now in zip((self._learned.unexplained[number], self._learned.explained[number]), seen, strict=True):
            rate = (1 / self._learned.calls.to(known)).clamp_(min=_SLOWLY)
            now = now.to(known)
            known += torch.where(now.isfinite(), now - known, 0.0) * rate

    def _jacobian(self, site: Site) -> Tensor:
        """That of a site; zero where the scalars that its noise is multiplied by know nothing of it."""
        matrix = self._learned.jacobians[site.number]
        return _within_reach(site, self._learned.forms[site.number], matrix) if matrix.ndim == 2 else matrix

    def _weights(self, site: Site, alive: Tensor) -> Tensor:
        """What the square of noise was multiplied by, (B, C, n)."""
        return self._split(site, (alive if alive.dtype is torch.bool else alive * alive).unsqueeze(0))[0]

    def _split(self, site: Site, rows: Tensor) -> Tensor:
        """Rows (K, *S) at a site as (K, B, C, n)."""
        form, matrix = self._learned.forms[site.number], self._learned.jacobians[site.number]
        return self.sites[site.number].split(rows, self._batch, form.here).to(matrix.dtype)


class NoPrediction:
    """Nothing is predicted: what a :class:`Prediction` answers for sites that take no part, at all of them."""

    held = 0

    def __init__(self) -> None:
        self.sites: dict[int, Grid] = {}

    def seen(self) -> list[Tensor]:
        return []

    def length(self, site: Site) -> None: ...
    def carry(self, site: Site, rows: Tensor) -> None: ...
    def close(self, tangents: Tensor) -> None: ...
    def begin(self) -> None: ...
    def see(self, parts: list[Tensor]) -> None: ...
    def wait(self, hold_back: Callable[[Tensor], None]) -> None: ...
    def restored(self, site: Site, activation: Tensor) -> None: ...
    def learn(self, site: Site, rows: Tensor, alive: Tensor | None, start: int) -> None: ...
    def weigh(self, site: Site, found: Tensor, known: Tensor | None, numbers: Tensor, alive: Tensor | None) -> None: ...


NOTHING = NoPrediction()


def _within_reach(site: Site, form: Form, matrix: Tensor) -> Tensor:
    """A Jacobian (T V, n) of zeros for the tokens that a site does not reach."""
    if site.reach is None:
        return matrix
    return matrix * site.reach.to(matrix).reshape(-1, 1).repeat_interleave(form.width, 0)


def _share(site: Site, form: Form) -> Tensor | float:
    """Of the numbers that a sample has at a site, the part that predicts a token of z, in the mean."""
    return 1 / form.here if form.blocks else _met(site)


def _met(site: Site) -> Tensor | float:
    """The part of the numbers that a sample has at a site that one token of z meets, in the mean."""
    return 1.0 if site.reach is None else site.reach.mean()
