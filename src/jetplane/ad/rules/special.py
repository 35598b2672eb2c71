"""Rules of special functions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..families import (
    chain,
    elementwise,
    jet_rule,
)
from ..jet import Operand, PairSet

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
