"""Rules of the incomplete gamma functions, and of the samples that are drawn by them.

With P(a, x) = sum_n T_n, T_n = x^(a+n) e^-x / Gamma(a+n+1), all terms positive:

    P_a = sum_n T_n d_n,   P_aa = sum_n T_n (d_n^2 - psi'(a+n+1)),   d_n = log x - psi(a+n+1)

and P_x is the density f = x^(a-1) e^-x / Gamma(a). A sample x of the distribution keeps its level P(a, x) as a varies
(implicit reparameterisation), so

    x' = -P_a / f,   x'' = -(P_aa + 2 f_a x' + f_x x'^2) / f.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import MissingRule
from ..algebra.families import chain, composite, jet_rule
from ..algebra.jet import Operand, PairSet

aten = torch.ops.aten
_REACH = 12.0  # standard deviations of a Poisson distribution, of whose density the terms are values
_MORE = 40  # terms, where the mean is small
_TERMS = 4096  # at a time

Derivatives = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def by_both(a: Tensor, x: Tensor) -> Derivatives:
    """P_a, P_x, P_aa, P_ax and P_xx at finite a > 0 and x > 0; in float64, for the sums lose digits in the tails."""
    a, x = torch.broadcast_tensors(a.double(), x.double())
    density = torch.exp(torch.xlogy(a - 1, x) - x - torch.lgamma(a))
    spread = _REACH * torch.sqrt(x) + _MORE
    first = torch.clamp(torch.floor(x - a - spread), min=0)
    terms = int(torch.nan_to_num((2 * spread).amax(), posinf=0.0)) + 2 if x.numel() else 0
    by_a, by_aa = torch.zeros_like(x), torch.zeros_like(x)
    for start in range(0, terms, max(1, _TERMS // max(1, x.numel()))):
        stop = min(terms, start + max(1, _TERMS // max(1, x.numel())))
        n = torch.arange(start, stop, dtype=x.dtype, device=x.device).reshape(-1, *[1] * x.ndim)
        order = a + first + n
        term = torch.exp(torch.xlogy(order, x) - x - torch.lgamma(order + 1))
        bent = torch.log(x) - torch.digamma(order + 1)
        by_a = by_a + torch.where(term > 0, term * bent, 0.0).sum(0)
        by_aa = by_aa + torch.where(term > 0, term * (bent**2 - torch.polygamma(1, order + 1)), 0.0).sum(0)
    return by_a, density, by_aa, density * (torch.log(x) - torch.digamma(a)), density * ((a - 1) / x - 1)


def _incomplete(pairs: PairSet, op: Any, a: Any, x: Any, sign: int) -> Operand:
    values = [one.primal if isinstance(one, Operand) else one for one in (a, x)]
    y = op(*values)
    if isinstance(a, Operand):
        found = [sign * part.to(y.dtype) for part in by_both(*values)]
    else:  # by the argument alone there is no sum
        density = sign * torch.exp(torch.xlogy(values[0] - 1, values[1]) - values[1] - torch.lgamma(values[0]))
        found = [density, density, density, density, density * ((values[0] - 1) / values[1] - 1)]
    by_a, by_x, by_aa, by_ax, by_xx = found
    hessian = {(0, 0): by_aa, (0, 1): by_ax, (1, 1): by_xx} if pairs.rows else {}
    return chain(pairs, y, [a, x], [by_a, by_x], hessian)


@jet_rule(aten.igamma, "elementwise")
def _igamma(pairs: PairSet, op: Any, a: Any, x: Any) -> Operand:
    return _incomplete(pairs, op, a, x, 1)


@jet_rule(aten.igammac, "elementwise")
def _igammac(pairs: PairSet, op: Any, a: Any, x: Any) -> Operand:
    return _incomplete(pairs, op, a, x, -1)


# -- samples ----------------------------------------------------------------------------------------------------------


@jet_rule(aten._standard_gamma.default, "elementwise")
def _standard_gamma(pairs: PairSet, op: Any, a: Operand, generator: Any = None) -> Operand:
    x = op(a.primal, generator)
    slope = torch.ops.aten._standard_gamma_grad(a.primal, x)  # what backprop takes, which is a fit to three digits
    if not pairs.rows:
        return chain(pairs, x, [a], [slope], {})
    by_a, density, by_aa, by_ax, by_xx = by_both(a.primal, x)
    exact = -by_a / density
    bent = -(by_aa + 2 * by_ax * exact + by_xx * exact**2) / density
    return chain(pairs, x, [a], [slope], {(0, 0): bent.to(x.dtype)})


@jet_rule(aten._sample_dirichlet.default)
def _sample_dirichlet(pairs: PairSet, op: Any, a: Operand, generator: Any = None) -> Operand:
    """x_j varies by g_j v_j - x_j sum_i g_i v_i, where g is that of torch's backward pass.

    Of three entries or more there is no function with these derivatives: taken once more, those by a_1 and then a_2
    are not those by a_2 and then a_1.
    """
    if pairs.rows:
        raise MissingRule(
            "a Dirichlet sample has no second derivative by its concentration (a Beta sample is one), for torch's "
            'first derivatives are not those of one function; expected first order (curvature="ggn", "fisher" or '
            '"none"), or samples of Gamma distributions divided by their sum',
            str(op),
        )
    x = op(a.primal, generator)
    total = a.primal.sum(-1, keepdim=True).expand_as(a.primal)
    slope = torch.ops.aten._dirichlet_grad(x, a.primal, total)
    tangent = a.tangent
    if tangent is not None:
        along = slope * tangent
        tangent = along - x * along.sum(-1, keepdim=True)
    return Operand(x, tangent, None)


composite("torch.distributions.dirichlet._Dirichlet", lambda concentration: aten._sample_dirichlet(concentration))
