"""Rules of arithmetic, powers, trigonometric functions and selection, element by element.

First derivatives follow torch's backward convention at kinks and ties; stable formulas come from the output.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..algebra.families import (
    chain,
    composite,
    constant,
    elementwise,
    elementwise_of_many,
    jet_rule,
    linear,
    primal_of,
    primals_of,
)
from ..algebra.jet import Operand, PairSet
from ..algebra.registry import CHOOSES

aten = torch.ops.aten
where, log, exp, sigmoid = torch.where, torch.log, torch.exp, torch.sigmoid
_LN2, _SQRT_PI, _SQRT_2PI = math.log(2.0), math.sqrt(math.pi), math.sqrt(2 * math.pi)


# -- zero derivative -----------------------------------------------------------------------------------------------

constant(
    *(aten.ceil, aten.floor, aten.round, aten.trunc, aten.sign, aten.sgn, aten.signbit, aten.angle),
    *(aten.floor_divide, aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like),
    *(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.new_empty_strided, aten.empty_permuted),
    aten._new_zeros_with_same_feature_meta,  # of torch.func's forward mode
    *(aten.zero, aten.fill.Scalar, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isnan, aten.isinf),
    *(aten.logical_not, aten.logical_and, aten.logical_or, aten.logical_xor, aten._local_scalar_dense),
    *(aten.rand_like, aten.randn_like, aten.randint_like, aten.bernoulli, aten.normal, aten.uniform, aten.poisson),
    *(aten.exponential, aten.random, aten.normal_functional, aten.cauchy, aten.geometric, aten.log_normal),
    *(aten.multinomial, aten.binomial),
)

# -- powers, exponentials, logarithms ------------------------------------------------------------------------------

elementwise(aten.neg, lambda x, y: -1)
elementwise(aten.reciprocal, lambda x, y: -y * y, lambda x, y, d: -2 * y * d)
elementwise(aten.sqrt, lambda x, y: 0.5 / y, lambda x, y, d: -2 * d**3)
elementwise(aten.rsqrt, lambda x, y: -0.5 * y**3, lambda x, y, d: -1.5 * y * y * d)
elementwise(aten.exp, lambda x, y: y, lambda x, y, d: y)
elementwise(aten.exp2, lambda x, y: y * _LN2, lambda x, y, d: d * _LN2)
elementwise(aten.expm1, lambda x, y: y + 1, lambda x, y, d: d)
elementwise(aten.log, lambda x, y: 1 / x, lambda x, y, d: -d * d)
elementwise(aten.log2, lambda x, y: 1 / (x * _LN2), lambda x, y, d: -d / x)
elementwise(aten.log10, lambda x, y: 1 / (x * math.log(10.0)), lambda x, y, d: -d / x)
elementwise(aten.log1p, lambda x, y: 1 / (1 + x), lambda x, y, d: -d * d)
elementwise(
    aten.pow.Tensor_Scalar,
    lambda x, y, e: None if e == 0 else 2 * x if e == 2 else e * x ** (e - 1),  # squares are many, and x**1 is a pass
    lambda x, y, d, e: None if e in (0, 1) else 2 if e == 2 else e * (e - 1) * x ** (e - 2),
)


def _zero_base(base: Any, exponent: Any) -> Any:
    """Where 0**e, e >= 0, makes the derivative by the exponent zero; of a complex e its real part counts."""
    return (torch.as_tensor(base) == 0) & (torch.as_tensor(exponent).real >= 0)


def _log_power(y: Tensor, base: Any, exponent: Any, order: int = 1) -> Tensor:
    logarithm = torch.as_tensor(base, dtype=y.dtype, device=y.device).log()
    return where(_zero_base(base, exponent).to(y.device), 0.0, y * logarithm**order)


def _power_mixed(y: Tensor, x: Tensor, e: Tensor) -> Tensor:
    mixed = x ** (e - 1) * (1 + e * log(x))
    return where((x == 0) & (e.real > 1), 0.0, mixed)


elementwise_of_many(
    aten.pow.Tensor_Tensor,
    2,
    lambda y, x, e: (lambda: where(e == 0, 0.0, e * x ** (e - 1)), lambda: _log_power(y, x, e)),
    lambda y, x, e: {
        (0, 0): lambda: where((e == 0) | (e == 1), 0.0, e * (e - 1) * x ** (e - 2)),
        (0, 1): lambda: _power_mixed(y, x, e),
        (1, 1): lambda: _log_power(y, x, e, 2),
    },
)
elementwise_of_many(
    aten.pow.Scalar,
    2,
    lambda y, base, e: (None, lambda: _log_power(y, base, e)),
    lambda y, base, e: {(1, 1): lambda: _log_power(y, base, e, 2)},
)

# -- trigonometric and hyperbolic ----------------------------------------------------------------------------------

elementwise(aten.sin, lambda x, y: torch.cos(x), lambda x, y, d: -y)
elementwise(aten.cos, lambda x, y: -torch.sin(x), lambda x, y, d: -y)
elementwise(aten.tan, lambda x, y: 1 + y * y, lambda x, y, d: 2 * y * d)
elementwise(aten.asin, lambda x, y: torch.rsqrt(1 - x * x), lambda x, y, d: x * d**3)
elementwise(aten.acos, lambda x, y: -torch.rsqrt(1 - x * x), lambda x, y, d: x * d**3)
elementwise(aten.atan, lambda x, y: 1 / (1 + x * x), lambda x, y, d: -2 * x * d * d)
elementwise(aten.sinh, lambda x, y: torch.cosh(x), lambda x, y, d: y)
elementwise(aten.cosh, lambda x, y: torch.sinh(x), lambda x, y, d: y)
elementwise(aten.tanh, lambda x, y: 1 - y * y, lambda x, y, d: -2 * y * d)
elementwise(aten.asinh, lambda x, y: torch.rsqrt(x * x + 1), lambda x, y, d: -x * d**3)
elementwise(aten.acosh, lambda x, y: torch.rsqrt(x * x - 1), lambda x, y, d: -x * d**3)
elementwise(aten.atanh, lambda x, y: 1 / (1 - x * x), lambda x, y, d: 2 * x * d * d)
elementwise(aten.deg2rad, lambda x, y: math.pi / 180)
elementwise(aten.rad2deg, lambda x, y: 180 / math.pi)


def _sinc_first(x: Tensor, y: Tensor) -> Tensor:
    z = math.pi * x
    near = x.abs() < 1e-2
    safe = where(near, 1.0, x)
    series = math.pi * z * (-1 / 3 + z * z / 30 - z**4 / 840 + z**6 / 45360)
    return where(near, series, (torch.cos(math.pi * safe) - torch.sinc(safe)) / safe)


def _sinc_second(x: Tensor, y: Tensor, d: Tensor) -> Tensor:
    z = math.pi * x
    near = x.abs() < 1e-2
    series = math.pi**2 * (-1 / 3 + z * z / 10 - z**4 / 168 + z**6 / 6480)
    return where(near, series, -(math.pi**2) * y - 2 * d / where(near, 1.0, x))


elementwise(aten.sinc, _sinc_first, _sinc_second)


def _inverse_square_norm(y: Tensor, x: Tensor) -> Tensor:
    square = y * y + x * x
    return where(square == 0, 0.0, 1 / square)


elementwise_of_many(
    aten.atan2,
    2,
    lambda _, y, x: (lambda: x * _inverse_square_norm(y, x), lambda: -y * _inverse_square_norm(y, x)),
    lambda _, y, x: {
        (0, 0): lambda: -2 * x * y * _inverse_square_norm(y, x) ** 2,
        (0, 1): lambda: (y * y - x * x) * _inverse_square_norm(y, x) ** 2,
        (1, 1): lambda: 2 * x * y * _inverse_square_norm(y, x) ** 2,
    },
)
elementwise_of_many(
    aten.hypot,
    2,
    lambda y, a, b: (lambda: a / y, lambda: b / y),
    lambda y, a, b: {
        (0, 0): lambda: b * b / y**3,
        (0, 1): lambda: -a * b / y**3,
        (1, 1): lambda: a * a / y**3,
    },
)

# -- absolute values, rounding, selection --------------------------------------------------------------------------

elementwise(aten.abs, lambda x, y: torch.sgn(x))
elementwise(aten.frac, lambda x, y: 1)
elementwise(aten.nan_to_num, lambda x, y, *bounds, **kw: torch.isfinite(x))
elementwise_of_many(aten.heaviside, 2, lambda y, x, values: (None, lambda: x == 0))  # the values stand at x = 0 alone
elementwise_of_many(aten.nextafter, 2, lambda y, a, b: (1, None))
elementwise_of_many(aten.fmod, 2, lambda y, a, b: (1, lambda: -torch.trunc(a / b)))
elementwise_of_many(aten.remainder, 2, lambda y, a, b: (1, lambda: -torch.floor(a / b)))
elementwise_of_many(aten.copysign, 2, lambda y, a, b: (lambda: where(a == 0, 0.0, y / a), None))


@jet_rule(aten.frexp)
def _frexp(pairs: PairSet, op: Any, x: Operand) -> Any:
    mantissa, exponent = op(x.primal)
    return chain(pairs, mantissa, [x], [torch.ldexp(torch.ones_like(mantissa), -exponent)], {}), exponent


def _wins(a: Tensor, b: Tensor) -> Tensor:
    """The share of a in max(a, b): one, zero, or a half at ties."""
    return where(a == b, 0.5, (a > b).to(torch.result_type(a, b)))


elementwise_of_many(aten.maximum, 2, lambda y, a, b: (lambda: _wins(a, b), lambda: _wins(b, a)))
elementwise_of_many(aten.minimum, 2, lambda y, a, b: (lambda: _wins(b, a), lambda: _wins(a, b)))
elementwise_of_many(aten.fmax, 2, lambda y, a, b: (lambda: (a >= b) | b.isnan(), lambda: ~((a >= b) | b.isnan())))
elementwise_of_many(aten.fmin, 2, lambda y, a, b: (lambda: (a <= b) | b.isnan(), lambda: ~((a <= b) | b.isnan())))


def _inside(x: Tensor, low: Any, high: Any) -> Any:
    inside = torch.ones_like(x, dtype=torch.bool) if low is None else x >= low
    return inside if high is None else inside & (x <= high)


elementwise(aten.clamp.default, lambda x, y, low=None, high=None, **kw: _inside(x, low, kw.get("max", high)))
elementwise(aten.clamp_min.default, lambda x, y, low: x >= low)
elementwise(aten.clamp_max.default, lambda x, y, high: x <= high)
elementwise_of_many(aten.clamp_min.Tensor, 2, lambda y, x, low: (lambda: x >= low, lambda: x < low))
elementwise_of_many(aten.clamp_max.Tensor, 2, lambda y, x, high: (lambda: x <= high, lambda: x > high))


@jet_rule(aten.clamp.Tensor, "elementwise")
def _clamp(pairs: PairSet, op: Any, x: Any, low: Any = None, high: Any = None, **kw: Any) -> Operand:
    low, high = kw.get("min", low), kw.get("max", high)
    value, least, most = primals_of((x, low, high))
    y = op(value, least, most)
    above = torch.zeros_like(value, dtype=torch.bool) if most is None else value > most
    below = torch.zeros_like(value, dtype=torch.bool) if least is None else value < least
    if least is not None and most is not None:
        above, below = above | (most < least), below & (least < most)
    return chain(pairs, y, [x, low, high], [~(above | below), below, above], {})


@jet_rule(aten.where.self, "linear", CHOOSES)
def _where(pairs: PairSet, op: Any, condition: Tensor, a: Any, b: Any) -> Operand:
    # selects rows instead of multiplying by a mask, so that what is not taken may be infinite
    y = op(condition, primal_of(a), primal_of(b))

    def select(part: str) -> Any:
        left = getattr(a, part) if isinstance(a, Operand) else None
        right = getattr(b, part) if isinstance(b, Operand) else None
        if left is None and right is None:
            return None
        rows = [
            y.new_zeros(()) if r is None else r.reshape(r.shape[0], *(1,) * (y.ndim + 1 - r.ndim), *r.shape[1:])
            for r in (left, right)
        ]
        return torch.where(condition, *rows)

    tangent, second = select("tangent"), select("second") if pairs.rows else None
    count = pairs.k if tangent is not None else 0
    return Operand(
        y,
        None if tangent is None else tangent.expand(count, *y.shape),
        None if second is None else second.expand(pairs.rows, *y.shape),
    )


# -- arithmetic ----------------------------------------------------------------------------------------------------

elementwise_of_many(aten.add, 2, lambda y, a, b, alpha=1: (1, alpha))
elementwise_of_many(aten.sub, 2, lambda y, a, b, alpha=1: (1, -alpha))
elementwise_of_many(aten.rsub, 2, lambda y, a, b, alpha=1: (-alpha, 1))
elementwise_of_many(aten.mul, 2, lambda y, a, b: (b, a), lambda y, a, b: {(0, 1): 1})


def _inverse(y: Tensor, b: Any) -> Any:
    """1 / b in the dtype of the quotient: for an integer b torch would take float32."""
    return 1 / (b.to(y.dtype) if isinstance(b, Tensor) else b)


_DIVISION = (
    lambda y, a, b: (lambda: _inverse(y, b), lambda: -y / b),
    lambda y, a, b: {(0, 1): lambda: -(_inverse(y, b) ** 2), (1, 1): lambda: 2 * y * _inverse(y, b) ** 2},
)
elementwise_of_many(aten.div.Tensor, 2, *_DIVISION)
elementwise_of_many(aten.div.Scalar, 2, *_DIVISION)


@jet_rule(aten.div.Tensor_mode, "elementwise")
@jet_rule(aten.div.Scalar_mode, "elementwise")
def _divide(pairs: PairSet, op: Any, a: Any, b: Any, *, rounding_mode: str | None) -> Any:
    x, z = primals_of((a, b))
    y = op(x, z, rounding_mode=rounding_mode)
    if rounding_mode is not None:
        return y
    first, second = _DIVISION
    return chain(pairs, y, [a, b], first(y, x, z), second(y, x, z))


elementwise_of_many(
    aten.addcmul,
    3,
    lambda y, s, a, b, value=1: (1, lambda: value * b, lambda: value * a),
    lambda y, s, a, b, value=1: {(1, 2): value},
)
elementwise_of_many(
    aten.addcdiv,
    3,
    lambda y, s, a, b, value=1: (1, lambda: value / b, lambda: -value * a / (b * b)),
    lambda y, s, a, b, value=1: {(1, 2): lambda: -value / (b * b), (2, 2): lambda: 2 * value * a / b**3},
)
elementwise_of_many(
    aten.lerp,
    3,
    lambda y, start, end, weight: (1 - weight, weight, lambda: end - start),
    lambda y, start, end, weight: {(0, 2): -1, (1, 2): 1},
)
elementwise_of_many(
    aten.xlogy,
    2,
    lambda y, a, b: (
        lambda: where((torch.as_tensor(a) == 0) & (torch.as_tensor(b) <= 0), 0.0, log(torch.as_tensor(b))),
        lambda: a / b,
    ),
    lambda y, a, b: {(0, 1): lambda: 1 / b, (1, 1): lambda: -a / (b * b)},
)
elementwise_of_many(
    aten.special_xlog1py,
    2,
    lambda y, a, b: (
        lambda: where((torch.as_tensor(a) == 0) & (torch.as_tensor(b) <= -1), 0.0, torch.log1p(torch.as_tensor(b))),
        lambda: a / (1 + b),
    ),
    lambda y, a, b: {(0, 1): lambda: 1 / (1 + b), (1, 1): lambda: -a / (1 + b) ** 2},
)
elementwise_of_many(
    aten.logaddexp,
    2,
    lambda y, a, b: (lambda: sigmoid(a - b), lambda: sigmoid(b - a)),
    lambda y, a, b: {
        (0, 0): lambda: sigmoid(a - b) * sigmoid(b - a),
        (0, 1): lambda: -sigmoid(a - b) * sigmoid(b - a),
        (1, 1): lambda: sigmoid(a - b) * sigmoid(b - a),
    },
)
composite(aten.logaddexp2, lambda a, b: torch.logaddexp(a * _LN2, b * _LN2) / _LN2)
linear(aten.real)
linear(aten.lift_fresh_copy)
