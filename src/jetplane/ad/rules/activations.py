"""Rules of activation functions. First derivatives follow torch's backward convention at kinks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..algebra.families import chain, composite, elementwise, elementwise_of_many, jet_rule
from ..algebra.jet import Operand, PairSet

aten = torch.ops.aten
where, log, exp, sigmoid = torch.where, torch.log, torch.exp, torch.sigmoid
_LN2, _SQRT_PI, _SQRT_2PI = math.log(2.0), math.sqrt(math.pi), math.sqrt(2 * math.pi)


@jet_rule(aten.relu, "elementwise")
def _relu(pairs: PairSet, op: Any, x: Operand) -> Operand:
    y = op(x.primal)
    return Operand(y, _passed(x.tangent, y), _passed(x.second, y) if pairs.rows else None)


def _passed(rows: Tensor | None, y: Tensor) -> Tensor | None:
    """Rows where the output is positive, as in torch's backward."""
    if rows is None:
        return None
    if type(rows) is Tensor and rows.is_cpu:  # vectorised, where a choice by a mask is not: less than half of the time
        return aten.threshold_backward(rows, y, 0)
    return torch.where(y > 0, rows, 0.0)


elementwise(aten.threshold, lambda x, y, threshold, value: x > threshold)
elementwise(aten.leaky_relu, lambda x, y, slope=0.01: where(x > 0, torch.ones_like(x), slope))
elementwise(aten.hardtanh, lambda x, y, low=-1.0, high=1.0: (x > low) & (x < high))
elementwise(aten.hardsigmoid, lambda x, y: ((x > -3) & (x < 3)).to(x.dtype) / 6)
elementwise(
    aten.hardswish,
    lambda x, y: where(x <= -3, 0.0, where(x < 3, x / 3 + 0.5, 1.0)),
    lambda x, y, d: ((x > -3) & (x < 3)).to(x.dtype) / 3,
)
elementwise(aten.hardshrink, lambda x, y, cut=0.5: (x < -cut) | (x > cut))
elementwise(aten.softshrink, lambda x, y, cut=0.5: (x < -cut) | (x > cut))
elementwise(aten.sigmoid, lambda x, y: y * (1 - y), lambda x, y, d: d * (1 - 2 * y))


def _logit_first(x: Tensor, y: Tensor, eps: float | None = None) -> Tensor:
    d = 1 / (x * (1 - x))
    if eps is None:
        return where((x < 0) | (x > 1), math.nan, d)
    return where((x < eps) | (x > 1 - eps), 0.0, d)


elementwise(aten.logit, _logit_first, lambda x, y, d, eps=None: (2 * x - 1) * d * d)
elementwise(
    aten.silu,
    lambda x, y: sigmoid(x) * (1 + x * sigmoid(-x)),
    lambda x, y, d: sigmoid(x) * sigmoid(-x) * (2 + x * (1 - 2 * sigmoid(x))),
)


def _mish_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    t, s = torch.tanh(torch.nn.functional.softplus(x)), sigmoid(x)
    return t, s, 1 - t * t


def _mish_first(x: Tensor, y: Tensor) -> Tensor:
    t, s, c = _mish_parts(x)
    return t + x * s * c


def _mish_second(x: Tensor, y: Tensor, d: Tensor) -> Tensor:
    t, s, c = _mish_parts(x)
    return c * (2 * s + x * s * (1 - s - 2 * t * s))


elementwise(aten.mish, _mish_first, _mish_second)


def _softplus_first(x: Tensor, y: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    return where(x * beta > threshold, 1.0, sigmoid(x * beta))


def _softplus_second(x: Tensor, y: Tensor, d: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    return where(x * beta >= threshold, 0.0, beta * sigmoid(x * beta) * sigmoid(-x * beta))  # torch's side at the kink


elementwise(aten.softplus, _softplus_first, _softplus_second)


def _elu_first(x: Tensor, y: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    tail = alpha * scale * input_scale * exp(torch.clamp(x, max=0) * input_scale)
    return where(x > 0, float(scale), tail)


def _elu_second(x: Tensor, y: Tensor, d: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    return where(x >= 0, 0.0, d * input_scale)  # at the kink torch's side, which has none


elementwise(aten.elu, _elu_first, _elu_second)
elementwise(
    aten.celu,
    lambda x, y, alpha=1.0: _elu_first(x, y, alpha, 1, 1 / alpha),
    lambda x, y, d, alpha=1.0: _elu_second(x, y, d, alpha, 1, 1 / alpha),
)


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Distribution function and density of the standard normal."""
    return 0.5 * torch.erfc(-x / math.sqrt(2)), exp(-x * x / 2) / _SQRT_2PI


def _gelu_tanh_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """tanh(u), u' and u'' of the tanh approximation's u = sqrt(2/pi) (x + 0.044715 x^3)."""
    c, a = math.sqrt(2 / math.pi), 0.044715
    return torch.tanh(c * (x + a * x**3)), c * (1 + 3 * a * x * x), c * 6 * a * x


def _gelu_first(x: Tensor, y: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        t, u1, _ = _gelu_tanh_parts(x)
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * u1
    cdf, pdf = _normal(x)
    return cdf + x * pdf


def _gelu_second(x: Tensor, y: Tensor, d: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        t, u1, u2 = _gelu_tanh_parts(x)
        c = 1 - t * t
        return c * u1 + 0.5 * x * (c * u2 - 2 * t * c * u1 * u1)
    return _normal(x)[1] * (2 - x * x)


elementwise(aten.gelu, _gelu_first, _gelu_second)
elementwise_of_many(
    aten._prelu_kernel,
    2,
    lambda y, x, w: (lambda: where(x > 0, 1.0, w), lambda: where(x > 0, 0.0, x)),
    lambda y, x, w: {(0, 1): lambda: x <= 0},
)


@jet_rule(aten.log_sigmoid_forward, "elementwise")
def _log_sigmoid(pairs: PairSet, op: Any, x: Operand) -> Any:
    y, buffer = op(x.primal)
    up, down = sigmoid(x.primal), sigmoid(-x.primal)
    return chain(pairs, y, [x], [down], {(0, 0): -up * down}), buffer


@jet_rule(aten.rrelu_with_noise.default, "elementwise")
def _rrelu(
    pairs: PairSet,
    op: Any,
    x: Operand,
    noise: Tensor,
    lower: Any = 0.125,
    upper: Any = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Operand:
    y = op(x.primal, noise, lower, upper, training, generator)  # draws the noise, once
    slope = noise if training else where(x.primal > 0, torch.ones_like(y), (lower + upper) / 2)
    return chain(pairs, y, [x], [slope], {})


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    value, gate = x.chunk(2, dim)
    return value * sigmoid(gate)


composite(aten.glu, _glu)
