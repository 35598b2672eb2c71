"""A learned control variate: what the noise is known to do to the loss's input is taken out, and put back exactly.

z is the input of the loss, C numbers a sample, and e = d loss / d z, exact. For each site a matrix A (C, n) is learned
that approximates the mean Jacobian dz/dh at its activation. The noise u there makes a tangent A u of z, which is
predicted, and only what is not goes into the scalar: s' = s - e . A u. As E[(e . A u) u] = A^T e exactly, the estimate
mean_j s'_j u_j + A^T e has the same mean for every A that does not depend on u, and a variance that is the less the
better A is. A learns from the same tangents, A += r (dz - A u) u^T, once it has been used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from .balance import lengths, unpredicted
from .layout import Layout, candidates
from .plan import Plan, Site, Tail

__all__ = ["Control", "Prediction"]

log = logging.getLogger("jetplane")

_RATE = 0.1  # of learning, once there were some calls: it has to follow the weights
_SLOWLY = 0.02  # likewise of what is not predicted, which is a noisy number
_SETTLED = 20  # calls before noise is balanced
_RARE = 0.01  # share of samples below which a unit's Jacobian is learned more slowly
_WIDEST = 1024  # numbers of a loss's input for one sample
_LARGEST, _SHARE = 1 << 20, 4  # numbers to learn: that many, or this many for each parameter if that is more
_PROGRAMS = 8  # whose Jacobians are kept


@dataclass(eq=False)
class _Learned:
    """What is known of one program."""

    width: int  # C
    sizes: dict[int, int]  # by site: n, where there is to be a Jacobian
    devices: list[torch.device]  # by site
    dtype: torch.dtype
    calls: Tensor  # (), how many it was learned from
    jacobians: dict[int, Tensor] = field(default_factory=dict)  # by site: (C, n), once its samples are told apart
    activity: dict[int, Tensor] = field(default_factory=dict)  # likewise (n,): the share of samples with a derivative
    unexplained: dict[int, Tensor] = field(default_factory=dict)  # likewise (): |g - A^T e|^2 of a sample, in the mean

    def start(self, site: int) -> None:
        """Have a Jacobian for a site."""
        if site not in self.jacobians:
            matrix = torch.zeros((self.width, self.sizes[site]), dtype=self.dtype, device=self.devices[site])
            self.jacobians[site], self.activity[site] = matrix, torch.ones_like(matrix[0])
            self.unexplained[site] = torch.zeros((), dtype=self.dtype, device=self.devices[site])

    def reset(self) -> None:
        """In place: a captured graph goes on with it."""
        self.calls.zero_()
        for number in self.jacobians:
            self.jacobians[number].zero_()
            self.activity[number].fill_(1.0)
            self.unexplained[number].zero_()

    def tensors(self) -> dict[str, Tensor]:
        named = {"calls": self.calls}
        named |= {f"jacobian.{number}": tensor for number, tensor in self.jacobians.items()}
        named |= {f"activity.{number}": tensor for number, tensor in self.activity.items()}
        return named | {f"unexplained.{number}": tensor for number, tensor in self.unexplained.items()}

    def load(self, name: str, given: Mapping[str, Tensor]) -> None:
        """Take over what another one has learned of the program."""
        shapes: dict[str, tuple[int, ...]] = {"calls": ()}
        shapes |= {f"jacobian.{number}": (self.width, n) for number, n in self.sizes.items()}
        shapes |= {f"activity.{number}": (n,) for number, n in self.sizes.items()}
        shapes |= {f"unexplained.{number}": () for number in self.sizes}
        for key, tensor in given.items():
            if shapes.get(key) != tensor.shape:
                expected = shapes.get(key, f"one of {', '.join(shapes)}")
                raise ValueError(
                    f"the control state has {name}.{key} of shape {tuple(tensor.shape)}; expected {expected}."
                )
        sites = [n for n in self.sizes if f"jacobian.{n}" in given or f"activity.{n}" in given]
        wanted = {
            "calls",
            *(f"{what}.{number}" for number in sites for what in ("jacobian", "activity", "unexplained")),
        }
        if wanted - given.keys():
            raise ValueError(
                f"the control state has no {name}.{min(wanted - given.keys())}; expected all that was saved."
            )
        for number in sites:
            self.start(number)
        for key, tensor in self.tensors().items():
            if key in given:
                tensor.copy_(given[key])


class Control:
    """The Jacobians that were learned for some parameters, by program. Keeps none of the parameters alive."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._numbers = max(_LARGEST, _SHARE * sum(tensor.numel() for tensor in parameters))
        self._dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        self._learned: dict[str, _Learned | None] = {}  # by program; None: too large, or there is no way
        self._loaded: dict[str, dict[str, Tensor]] = {}  # of programs that were not called since

    def of(self, plan: Plan, samples: int) -> Prediction | None:
        """For one call with J = ``samples`` tangents; None where nothing is predicted."""
        if plan.name not in self._learned:
            new = self._new(plan)
            self._take(plan.name, new)
            self._learned[plan.name] = new
        learned = self._learned[plan.name]
        if learned is None:
            return None
        prediction = Prediction(plan, learned, samples)
        return prediction if prediction.sites else None

    def reset(self) -> None:
        """Forget what was learned."""
        self._loaded = {}
        for learned in filter(None, self._learned.values()):
            learned.reset()

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all that was learned."""
        known = {name: learned.tensors() for name, learned in self._learned.items() if learned is not None}
        return {
            f"{name}.{key}": tensor.clone()
            for name, tensors in (known | self._loaded).items()
            for key, tensor in tensors.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what another one has learned."""
        loaded: dict[str, dict[str, Tensor]] = {}
        for key, tensor in state.items():
            if not isinstance(tensor, Tensor) or not bool(tensor.isfinite().all()):
                what = "values that are not finite" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(f"the control state has {what} in {key}; expected a tensor of finite numbers.")
            name, _, rest = key.partition(".")
            loaded.setdefault(name, {})[rest] = tensor.clone()
        self.reset()
        self._loaded = loaded
        for name, learned in self._learned.items():
            self._take(name, learned)

    def _take(self, name: str, learned: _Learned | None) -> None:
        """Fill in what was loaded of a program that is known by now."""
        if learned is not None and name in self._loaded:
            learned.load(name, self._loaded[name])
            del self._loaded[name]

    def _new(self, plan: Plan) -> _Learned | None:
        why, width = None, 0
        if plan.tail is None:
            why = "the derivative of the losses by what enters them is not known"
        else:
            width = sum(plan.tail.inputs[node].numel() // plan.samples for node in _layouts(plan.tail, plan.samples))
            if not width:
                why = "what enters the losses cannot be split by sample"
            elif width > _WIDEST:
                why = f"the losses depend on {width} numbers of a sample, more than {_WIDEST}"
            elif sum(learned is not None for learned in self._learned.values()) >= _PROGRAMS:
                why = f"{_PROGRAMS} other programs have one"
        sizes = {} if why else self._sizes(plan, width)
        left_out = len(plan.sites) - len(sizes)
        if left_out:
            log.info(
                "No control variate at %d of %d places where noise enters: %s.",
                *(left_out, len(plan.sites), why or "their Jacobians are too large"),
            )
        if not sizes:
            return None
        calls = torch.zeros((), dtype=torch.int64, device=plan.sites[0].device)
        return _Learned(width, sizes, [site.device for site in plan.sites], self._dtype, calls)

    def _sizes(self, plan: Plan, width: int) -> dict[int, int]:
        """By site: the numbers of a sample there. The smallest sites, as many as there is room for."""
        left, sizes = self._numbers // width, dict[int, int]()
        for site in sorted(plan.sites, key=lambda site: site.shape.numel()):
            size = site.shape.numel() // plan.samples  # of no use where that leaves a rest: samples are coupled there
            left -= size
            if left >= 0:
                sizes[site.number] = size
        return dict(sorted(sizes.items()))


def _layouts(tail: Tail, samples: int) -> dict[int, Layout]:
    """By node: where the samples of what enters the loss lie."""
    found = {node: _guess(shape, samples) for node, shape in tail.inputs.items()}
    return {node: layout for node, layout in found.items() if layout is not None}


@cache
def _guess(shape: torch.Size, samples: int) -> Layout | None:
    """The usual layout; not proven as those of the sites are: a wrong one makes a poor prediction, and no bias."""
    return next(iter(candidates(shape, samples)), None)


class Prediction:
    """The control variate of one call: both passes tell it what they do."""

    def __init__(self, plan: Plan, learned: _Learned, samples: int) -> None:
        assert plan.tail is not None
        self._learned, self._samples, self._batch = learned, samples, plan.samples
        layouts = _layouts(plan.tail, plan.samples)
        self._inputs = {node: (layout, plan.tail.inputs[node]) for node, layout in layouts.items()}
        self.sites: dict[int, Layout] = {}  # that take part
        for number in learned.sizes:
            site = plan.sites[number]
            layout = site.layout
            if plan.samples == 1:  # nothing has to be told apart
                layout = _guess(site.shape, 1)
            if layout is not None:
                learned.start(number)
                self.sites[number] = layout
        self._predicted: Tensor | None = None  # (K, B, C), of the tangents that are carried now
        self._residuals: list[Tensor] = []  # (K, B, C), of each chunk
        self._lesson: Tensor | None = None  # (J, B, C), residuals times the rate of learning
        self._rate: Tensor | None = None  # of the activity
        self._slopes: Tensor | None = None  # e (B, C)
        self._lengths = self._balanced()

    def _balanced(self) -> dict[int, Tensor]:
        """By site: the length of its noise, (). From calls before this one, so that the estimate stays unbiased."""
        if not self.sites:
            return {}
        known = [self._learned.unexplained[number] for number in self.sites]
        found = lengths(torch.stack([part.to(known[0].device) for part in known]))
        found = torch.where(self._learned.calls.to(found.device) >= _SETTLED, found, 1.0)
        return {
            number: length.to(known[i].device) for i, (number, length) in enumerate(zip(self.sites, found, strict=True))
        }

    @property
    def held(self) -> int:
        """How many bytes it needs beside what the passes hold."""
        matrix = self._learned.width * max(self._learned.sizes.values())
        carried = self._samples * self._batch * self._learned.width
        return (2 * matrix + 3 * carried) * self._learned.dtype.itemsize

    def length(self, site: Site) -> Tensor | None:
        """That of a site's noise, (); None for 1."""
        return self._lengths.get(site.number)

    # -- first pass -------------------------------------------------------------------------------------------------

    @property
    def needs_slopes(self) -> bool:
        """Whether the loss's derivative is still to be found."""
        return self._slopes is None

    def carry(self, site: Site, rows: Tensor) -> None:
        """Noise ``rows`` (K, *S) enters at a site."""
        if site.number in self.sites:
            matrix = self._learned.jacobians[site.number]
            part = self._split(site, rows) @ matrix.T
            if self._predicted is None:
                self._predicted = part
            else:
                self._predicted += part.to(self._predicted.device)

    def close(self, tangents: Mapping[int, Tensor | None], slopes: Mapping[int, Tensor] | None, k: int) -> Tensor:
        """The part of the losses' tangents (K, B) that was predicted.

        Given the tangents (K, *S) of the inputs of the loss and, the first time, its derivatives (*S) by them.
        """
        predicted = self._predicted
        assert predicted is not None
        self._predicted = None
        if slopes is not None:
            self._slopes = self._joined({node: slope.unsqueeze(0) for node, slope in slopes.items()}, predicted, 1)[0]
        assert self._slopes is not None
        self._residuals.append(self._joined(tangents, predicted, k) - predicted)
        return (predicted * self._slopes).sum(-1)

    def _joined(self, rows: Mapping[int, Tensor | None], like: Tensor, k: int) -> Tensor:
        """Rows at the inputs of the loss, by sample: (K, B, C)."""
        parts = []
        for node, (layout, shape) in self._inputs.items():
            given = rows[node]
            given = like.new_zeros((k, *shape)) if given is None else given
            parts.append(layout.split(given, self._batch).to(like))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    # -- second pass ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """All tangents were carried."""
        calls, count = self._learned.calls, self._samples * self._batch
        residuals = torch.cat(self._residuals) if len(self._residuals) > 1 else self._residuals[0]
        calls += 1
        self._rate = (1 / calls.to(residuals)).clamp_(min=_RATE)
        # With a step c / (1 + ratio), for this many numbers of noise to a product, the expected error shrinks by the
        # factor 1 - c (2 - c) / (1 + ratio), and c / (2 - c) of what no Jacobian predicts is added to it in the end. A
        # half of the fastest step is nearly as fast, and has a third of that.
        alive = [self._learned.activity[number].sum().to(residuals.device) for number in self.sites]
        ratio = torch.stack(alive).sum() / count
        rate = torch.minimum(self._rate, 0.5 / (1 + ratio))
        finite = residuals.isfinite().all()  # else nothing is to be learned from them
        self._lesson = torch.where(finite, residuals, 0.0).mul_(rate / count)
        self._residuals = []
        assert self._slopes is not None
        self._slopes = self._slopes / self._batch

    def restored(self, site: Site, activation: Tensor) -> Tensor:
        """A^T e / B at an activation: the derivative that the scalars lack."""
        assert self._slopes is not None
        matrix = self._learned.jacobians[site.number]
        numbers = self._slopes.to(matrix.device) @ matrix
        return self.sites[site.number].join(numbers, activation.shape).to(activation.dtype)

    def learn(self, site: Site, rows: Tensor, alive: Tensor | None, start: int) -> None:
        """Improve a site's Jacobian, which was used, from tangents ``start`` on; ``alive`` is their mask (*S)."""
        assert self._lesson is not None and self._rate is not None
        matrix, activity = self._learned.jacobians[site.number], self._learned.activity[site.number]
        if alive is not None:
            rows = rows * alive
            now = self._split(site, alive.unsqueeze(0))[0].mean(0)
            if start == 0:
                activity += (now - activity) * self._rate.to(activity.device)
            activity = torch.maximum(activity, now)  # units that come to life all at once would be learned too fast
        lesson = self._lesson[start : start + rows.shape[0]].to(matrix.device).flatten(0, 1)
        update = lesson.T @ self._split(site, rows).flatten(0, 1)
        matrix += update.div_((activity + _RARE) * self._lengths[site.number])

    def weigh(self, site: Site, found: Tensor, scalars: Tensor, alive: Tensor | None) -> None:
        """Keep in mind how much of a site's derivative was not predicted; see `unpredicted`."""
        if self._samples == 1:  # there are no two tangents to compare
            return
        if alive is None:
            active = scalars.new_full((self._batch,), float(self._learned.sizes[site.number]))
        else:
            active = self._split(site, alive.unsqueeze(0))[0].sum(1)
            found = found * alive
        known = self._learned.unexplained[site.number]
        seen = (unpredicted(found, scalars, active) / self._lengths[site.number].square()).to(known)
        rate = (1 / self._learned.calls.to(known)).clamp_(min=_SLOWLY)
        known += torch.where(seen.isfinite(), seen - known, 0.0) * rate

    def _split(self, site: Site, rows: Tensor) -> Tensor:
        matrix = self._learned.jacobians[site.number]
        return self.sites[site.number].split(rows, self._batch).to(matrix.dtype)
