"""Rules of special functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import MissingRule
from ..algebra.families import chain, elementwise, jet_rule
from ..algebra.jet import Operand, PairSet
from ..algebra.registry import argument_names

aten = torch.ops.aten
where, log, exp, sigmoid = torch.where, torch.log, torch.exp, torch.sigmoid
_LN2, _SQRT_PI, _SQRT_2PI = math.log(2.0), math.sqrt(math.pi), math.sqrt(2 * math.pi)


elementwise(aten.erf, lambda x, y: 2 / _SQRT_PI * exp(-x * x), lambda x, y, d: -2 * x * d)
elementwise(aten.erfc, lambda x, y: -2 / _SQRT_PI * exp(-x * x), lambda x, y, d: -2 * x * d)
elementwise(aten.erfinv, lambda x, y: _SQRT_PI / 2 * exp(y * y), lambda x, y, d: 2 * y * d * d)
elementwise(aten.special_erfcx, lambda x, y: 2 * x * y - 2 / _SQRT_PI, lambda x, y, d: 2 * (y + x * d))
elementwise(aten.special_ndtri, lambda x, y: _SQRT_2PI * exp(y * y / 2), lambda x, y, d: y * d * d)
elementwise(
    aten.special_log_ndtr,
    lambda x, y: math.sqrt(2 / math.pi) / torch.special.erfcx(-x / math.sqrt(2)),
    lambda x, y, d: -d * (x + d),
)
elementwise(aten.special_entr, lambda x, y: -log(x) - 1, lambda x, y, d: -1 / x)
elementwise(aten.lgamma, lambda x, y: torch.digamma(x), lambda x, y, d: torch.polygamma(1, x))
elementwise(aten.digamma, lambda x, y: torch.polygamma(1, x), lambda x, y, d: torch.polygamma(2, x))


@jet_rule(aten.polygamma)
def _polygamma(pairs: PairSet, op: Any, n: int, x: Operand) -> Operand:
    higher = {(0, 0): torch.polygamma(n + 2, x.primal)} if pairs.rows else {}
    return chain(pairs, op(n, x.primal), [x], [torch.polygamma(n + 1, x.primal)], higher)


# -- of two arguments, of which the second is differentiated ----------------------------------------------------------


def _of_the_second(op: Any, first: Callable[..., Tensor], second: Callable[..., Tensor]) -> None:
    """A function of an order and a number: ``first(order, x)`` and ``second(order, x, d)`` are those by the number.

    Those by the order are no functions that torch has.
    """

    @jet_rule(op, "elementwise")
    def rule(pairs: PairSet, op: Any, order: Any, x: Any) -> Operand:
        if isinstance(order, Operand):
            name = argument_names(op)[0]
            message = f"the rule of {op} does not differentiate its argument {name!r}, which is perturbed"
            raise MissingRule(message, str(op))
        d = first(order, x.primal)
        hessian = {(1, 1): second(order, x.primal, d)} if pairs.rows else {}
        return chain(pairs, op(order, x.primal), [order, x], [None, d], hessian)


_of_the_second(
    aten.special_zeta,
    lambda s, q: -s * torch.special.zeta(s + 1, q),
    lambda s, q, d: s * (s + 1) * torch.special.zeta(s + 2, q),
)

# -- Bessel functions -------------------------------------------------------------------------------------------------

# f'' of f = J_n, Y_n is -f'/x - (1 - n^2/x^2) f, and that of I_n, K_n is -f'/x + (1 + n^2/x^2) f; J and I also at zero.


def _bessel_j_ratio(x: Tensor, order: int) -> Tensor:
    """J_1(x) / x for order 1 and J_2(x) / x for order 2; smooth at zero."""
    near = x.abs() < 1
    safe = where(near, 1.0, x)
    j0, j1 = torch.special.bessel_j0(safe), torch.special.bessel_j1(safe)
    far = j1 / safe if order == 1 else (2 * j1 / safe - j0) / safe
    term = torch.ones_like(x) / 2 if order == 1 else x / 8
    series = term
    for k in range(1, 10):  # the tenth term is below 1e-18 of the first for |x| < 1
        term = -term * (x * x / 4) / (k * (k + order))
        series = series + term
    return where(near, series, far)


elementwise(aten.special_bessel_j0, lambda x, y: -torch.special.bessel_j1(x), lambda x, y, d: _bessel_j_ratio(x, 1) - y)
elementwise(
    aten.special_bessel_j1,
    lambda x, y: torch.special.bessel_j0(x) - _bessel_j_ratio(x, 1),
    lambda x, y, d: _bessel_j_ratio(x, 2) - y,
)
elementwise(aten.special_bessel_y0, lambda x, y: -torch.special.bessel_y1(x), lambda x, y, d: -d / x - y)
elementwise(
    aten.special_bessel_y1,
    lambda x, y: torch.special.bessel_y0(x) - y / x,
    lambda x, y, d: -d / x - (1 - 1 / (x * x)) * y,
)
elementwise(
    aten.special_modified_bessel_i0,
    lambda x, y: torch.special.modified_bessel_i1(x),
    lambda x, y, d: y - _bessel_ratio(x, False, 1),
)
elementwise(
    aten.special_modified_bessel_i1,
    lambda x, y: torch.special.modified_bessel_i0(x) - _bessel_ratio(x, False, 1),
    lambda x, y, d: y - _bessel_ratio(x, False, 2),
)
elementwise(
    aten.special_modified_bessel_k0, lambda x, y: -torch.special.modified_bessel_k1(x), lambda x, y, d: y - d / x
)
elementwise(
    aten.special_modified_bessel_k1,
    lambda x, y: -torch.special.modified_bessel_k0(x) - y / x,
    lambda x, y, d: (1 + 1 / (x * x)) * y - d / x,
)


def _bessel_ratio(x: Tensor, scaled: bool, order: int) -> Tensor:
    """I_1(x) / x for order 1 and I_2(x) / x for order 2, times e^-|x| if scaled; smooth at zero."""
    near = x.abs() < 1
    safe = where(near, 1.0, x)
    i0, i1 = (torch.special.i0e, torch.special.i1e) if scaled else (torch.special.i0, torch.special.i1)
    far = i1(safe) / safe if order == 1 else (i0(safe) - 2 * i1(safe) / safe) / safe
    square, term = x * x / 4, torch.ones_like(x) / 2 if order == 1 else x / 8
    series = term
    for k in range(1, 10):  # the tenth term is below 1e-18 of the first for |x| < 1
        term = term * square / (k * (k + order))
        series = series + term
    return where(near, series * exp(-x.abs()) if scaled else series, far)


elementwise(aten.i0, lambda x, y: torch.special.i1(x), lambda x, y, d: y - _bessel_ratio(x, False, 1))
elementwise(
    aten.special_i1,
    lambda x, y: torch.special.i0(x) - _bessel_ratio(x, False, 1),
    lambda x, y, d: y - _bessel_ratio(x, False, 2),
)
elementwise(
    aten.special_i0e,
    lambda x, y: torch.special.i1e(x) - torch.sgn(x) * y,
    lambda x, y, d: y - _bessel_ratio(x, True, 1) - torch.sgn(x) * (torch.special.i1e(x) + d),
)


def _i1e_second(x: Tensor, y: Tensor, d: Tensor) -> Tensor:
    s = torch.sgn(x)
    plain = d + s * y  # e^-|x| I1'(x)
    return y - _bessel_ratio(x, True, 2) - s * plain - s * d


elementwise(
    aten.special_i1e,
    lambda x, y: torch.special.i0e(x) - torch.sgn(x) * y - _bessel_ratio(x, True, 1),
    _i1e_second,
)
