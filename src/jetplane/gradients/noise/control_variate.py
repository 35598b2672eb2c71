"""A learned control variate: what the noise is known to do to the loss's input is taken out, and put back exactly.

z is the input of the loss, and e = d loss / d z, exact. For each site a matrix A is learned that approximates the mean
Jacobian dz/dh at its activation. The noise u there makes a tangent A u of z, which is predicted, and only what is not
goes into the scalar: s' = s - e . A u. As E[(e . A u) u] = A^T e exactly, the estimate mean_j s'_j u_j + A^T e has the
same mean for every A that does not depend on u, and a variance that is the less the better A is. A learns from the same
tangents, A += r (dz - A u) u^T, once it has been used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..plan.noise_plan import NoisePlan, Site
from .learned import Form, Learned
from .readout import Readout

__all__ = ["ControlVariate"]

log = logging.getLogger("jetplane")

_WIDEST = 1024  # numbers of a loss's input: of one sample, or of one token where each is predicted by itself
_LARGEST, _SHARE = 1 << 20, 4  # numbers to learn: that many, or this many for each parameter if that is more
_PROGRAMS = 8  # whose Jacobians are kept


class ControlVariate:
    """The Jacobians that were learned for some parameters, by program. Keeps none of the parameters alive."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._numbers = max(_LARGEST, _SHARE * sum(tensor.numel() for tensor in parameters))
        self._dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        self._learned: dict[str, Learned | None] = {}  # by program; None: too large, or there is no way
        self._loaded: dict[str, dict[str, Tensor]] = {}  # of programs that were not called since

    def learned(self, plan: NoisePlan, readout: Readout | None) -> Learned | None:
        """What was learned of a program; None where nothing is predicted."""
        if plan.name not in self._learned:
            new = self._new(plan, readout)
            self._take(plan.name, new)
            self._learned[plan.name] = new
        return self._learned[plan.name]

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

    def _take(self, name: str, learned: Learned | None) -> None:
        """Fill in what was loaded of a program that is known by now."""
        if learned is not None and name in self._loaded:
            learned.load(name, self._loaded[name])
            del self._loaded[name]

    def _new(self, plan: NoisePlan, readout: Readout | None) -> Learned | None:
        why = self._why_not(readout)
        forms = {} if why or readout is None else self._forms(plan, readout)
        left_out = len(plan.sites) - len(forms)
        if left_out:
            log.info(
                "No control variate at %d of %d places where noise enters: %s.",
                *(left_out, len(plan.sites), why or "their Jacobians are too large"),
            )
        if not forms:
            return None
        calls = torch.zeros((), dtype=torch.int64, device=plan.sites[0].device)
        return Learned(forms, [site.device for site in plan.sites], self._dtype, calls)

    def _why_not(self, readout: Readout | None) -> str | None:
        """Why there is no control variate for a program; None where there can be one."""
        if readout is None:
            return "the derivative of the losses by what enters them is not known"
        if not readout.width:
            return "what enters the losses cannot be split by sample"
        if readout.width > _WIDEST:
            what = "token" if readout.paired else "sample"
            return f"the losses depend on {readout.width} numbers of a {what}, more than {_WIDEST}"
        if sum(learned is not None for learned in self._learned.values()) >= _PROGRAMS:
            return f"{_PROGRAMS} other programs have one"
        return None

    def _forms(self, plan: NoisePlan, readout: Readout) -> dict[int, Form]:
        """By site: the best form that there is room for once all have their smallest. Small sites come first."""
        left, found = self._numbers, list[tuple[int, list[Form]]]()
        for site in sorted(plan.sites, key=lambda site: site.shape.numel()):
            choice = _choice(site, plan.samples, readout)
            if choice and choice[-1].numbers <= left:
                found.append((site.number, choice))
                left -= choice[-1].numbers
        forms = dict[int, Form]()
        for number, choice in found:
            left += choice[-1].numbers
            forms[number] = next(form for form in choice if form.numbers <= left)
            left -= forms[number].numbers
        return dict(sorted(forms.items()))


def _choice(site: Site, samples: int, readout: Readout) -> list[Form]:
    """The forms that a site's Jacobian can have, the best first.

    Between tokens it is mostly that of attention, which each sample has another one of: a mean of that, with T times as
    many numbers, predicts little more.
    """
    tokens, width = readout.count, readout.width
    size = site.shape.numel() // samples  # of no use where that leaves a rest: samples are coupled there
    if site.tokens is not None:
        return [Form(tokens, width, tokens, size // tokens, blocks) for blocks in (tokens, 1)]
    return [Form(tokens, width, 1, size, 0)] if tokens * width <= _WIDEST else []
