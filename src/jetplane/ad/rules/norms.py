"""Rules of normalisation. The statistics are outputs too, and carry derivatives.

With c = x - mean(x) (or x itself, for the root mean square), r = (mean(c^2) + eps)^(-1/2), n = c r and
s_i = mean(n c_i), all means over the axes of one statistic:

    r_i  = -r^2 s_i
    r_ij = 3 r^3 s_i s_j - r^3 mean(c_i c_j) - r^2 mean(n c_ij)
    n_i  = r (c_i - n s_i)
    n_ij = r c_ij - r^2 (c_i s_j + c_j s_i) + c r_ij
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedProgram
from ..algebra.families import chain, composite, jet_rule, primal_of, primals_of, total
from ..algebra.jet import Operand, PairSet

aten = torch.ops.aten


def _normalise(pairs: PairSet, x: Any, mean: Tensor | None, rstd: Tensor, over: list[int]) -> tuple[Any, Any, Any]:
    """The jets of n, mean and r; the statistics keep the axes ``over`` (negative ones) with size 1."""
    value = primal_of(x).to(rstd.dtype)
    if value.requires_grad:
        # torch saves its statistics without an autograd graph, so they are written out for backprop through the rows
        mean = None if mean is None else value.mean(over, keepdim=True)
        variance = (value if mean is None else value - mean).square().mean(over, keepdim=True)
        rstd = (variance + (rstd**-2 - variance).detach()).rsqrt()
    centred = value if mean is None else value - mean
    n = centred * rstd
    if not isinstance(x, Operand):
        return n, mean, rstd

    def average(rows: Tensor) -> Tensor:
        return rows.mean(over, keepdim=True)

    def centre(rows: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if rows is None:
            return None, None
        rows = rows.to(rstd.dtype)
        if mean is None:
            return rows, None
        middle = average(rows)
        return rows - middle, middle

    c1, mean1 = centre(x.tangent)
    c2, mean2 = centre(x.second) if pairs.rows else (None, None)
    s = None if c1 is None else average(n * c1)
    r1 = None if s is None else -rstd * rstd * s
    n1 = None if c1 is None or s is None else rstd * (c1 - n * s)
    terms = [None if c2 is None else -rstd * rstd * average(n * c2)]
    if pairs.rows and c1 is not None and s is not None:
        terms.append(rstd**3 * (3 * pairs.outer(s, s) - average(pairs.outer(c1, c1))))
    r2 = total(terms)
    n2 = None
    if r2 is not None:
        cross = None if c1 is None or s is None else -rstd * rstd * pairs.cross(c1, s)
        n2 = total((centred * r2, cross, None if c2 is None else rstd * c2))
    return Operand(n, n1, n2), None if mean is None else Operand(mean, mean1, mean2), Operand(rstd, r1, r2)


def _affine(pairs: PairSet, y: Tensor, n: Any, weight: Any, bias: Any) -> Operand:
    """The jet of y = n * weight + bias, with the parameters shaped to broadcast."""
    if weight is None:
        return chain(pairs, y, [n, bias], [1, 1], {})
    return chain(pairs, y, [n, weight, bias], [primal_of(weight), primal_of(n), 1], {(0, 1): 1})


def _shaped(x: Any, *shape: int) -> Any:
    """A value or a jet, reshaped behind the row axis."""
    if not isinstance(x, Operand):
        return None if x is None else x.reshape(shape)
    rows = [None if r is None else r.reshape(r.shape[0], *shape) for r in (x.tangent, x.second)]
    return Operand(x.primal.reshape(shape), *rows)


def _as(y: Tensor, jet: Any) -> Any:
    """The rows of ``jet`` for the operation's own output ``y``."""
    if not isinstance(jet, Operand):
        return y
    rows = [None if r is None else r.reshape(r.shape[0], *y.shape) for r in (jet.tangent, jet.second)]
    return Operand(y, *rows)


# -- layer and group norm -----------------------------------------------------------------------------------------


@jet_rule(aten.native_layer_norm.default, "norm")
def _layer_norm(pairs: PairSet, op: Any, x: Any, shape: list[int], weight: Any, bias: Any, eps: float) -> Any:
    y, mean, rstd = op(*primals_of((x, shape, weight, bias)), eps)
    over = list(range(-len(shape), 0))
    n, mean_jet, rstd_jet = _normalise(pairs, x, mean, rstd, over)
    return _affine(pairs, y, n, weight, bias), _as(mean, mean_jet), _as(rstd, rstd_jet)


@jet_rule(aten._fused_rms_norm.default, "norm")
def _rms_norm(pairs: PairSet, op: Any, x: Any, shape: list[int], weight: Any, eps: float | None) -> Any:
    y, rstd = op(*primals_of((x, shape, weight)), eps)
    n, _, rstd_jet = _normalise(pairs, x, None, rstd, list(range(-len(shape), 0)))
    return _affine(pairs, y, n, weight, None), _as(rstd, rstd_jet)


@jet_rule(aten.native_group_norm.default, "norm")
def _group_norm(
    pairs: PairSet, op: Any, x: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float
) -> Any:
    y, mean, rstd = op(*primals_of((x, weight, bias)), N, C, HxW, group, eps)
    if y.numel() == 0:
        return y, mean, rstd
    grouped = _shaped(x, N, group, C // group, HxW)
    mean_shaped, rstd_shaped = (s.reshape(N, group, 1, 1) for s in (mean, rstd))
    n, mean_jet, rstd_jet = _normalise(pairs, grouped, mean_shaped, rstd_shaped, [-1, -2])
    flat = y.reshape(N, group, C // group, HxW)
    out = _affine(pairs, flat, n, _shaped(weight, 1, group, C // group, 1), _shaped(bias, 1, group, C // group, 1))
    return _as(y, out), _as(mean, mean_jet), _as(rstd, rstd_jet)


# -- batch norm ---------------------------------------------------------------------------------------------------
#
# The operation itself runs once, on the values, and so updates the running statistics once.


def _batch_norm(
    pairs: PairSet,
    y: Any,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    eps: float,
) -> Any:
    """The jets of the operation's outputs ``y``: out, mean, rstd and constants."""
    out, saved_mean, saved_rstd, *others = y
    value = primal_of(x)
    if value.numel() == 0:
        return y
    shape = (-1, *(1,) * (value.ndim - 2))
    weight, bias = _shaped(weight, *shape), _shaped(bias, *shape)
    if not training:
        jet = _fixed_norm(pairs, out, x, weight, bias, _shaped(mean, *shape), _shaped(var, *shape), eps)
        # in evaluation the saved statistics are copies of the running ones, or empty
        return jet, *_constants(op_outputs=(saved_mean, saved_rstd), inputs=(mean, var)), *others
    if isinstance(mean, Operand) or isinstance(var, Operand):
        raise UnsupportedProgram(
            "batch norm in training mode updates running statistics that are perturbed; expected constants there."
        )
    over = [d - value.ndim for d in range(value.ndim) if d != 1]
    n, mean_jet, rstd_jet = _normalise(pairs, x, saved_mean.reshape(shape), saved_rstd.reshape(shape), over)
    return _affine(pairs, out, n, weight, bias), _as(saved_mean, mean_jet), _as(saved_rstd, rstd_jet), *others


def _constants(op_outputs: tuple[Any, ...], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    if any(isinstance(i, Operand) for i in inputs) and any(o.numel() for o in op_outputs):
        raise UnsupportedProgram("batch norm returns running statistics that are perturbed; expected constants there.")
    return op_outputs


def _fixed_norm(pairs: PairSet, y: Tensor, x: Any, weight: Any, bias: Any, mean: Any, var: Any, eps: float) -> Operand:
    """y = (x - mean) (var + eps)^(-1/2) weight + bias, with every argument a variable."""
    x0, w, m, v = primals_of((x, weight, mean, var))
    w = 1.0 if w is None else w
    r = (v + eps).rsqrt()
    aw = r * w
    partials = [aw, lambda: (x0 - m) * r, 1, lambda: -aw, lambda: -0.5 * (x0 - m) * r**3 * w]
    hessian = {
        (0, 1): r,
        (0, 4): lambda: -0.5 * r**3 * w,
        (1, 3): lambda: -r,
        (1, 4): lambda: -0.5 * (x0 - m) * r**3,
        (3, 4): lambda: 0.5 * r**3 * w,
        (4, 4): lambda: 0.75 * (x0 - m) * r**5 * w,
    }
    return chain(pairs, y, [x, weight, bias, mean, var], partials, hessian)


@jet_rule(aten.native_batch_norm.default, "norm")
@jet_rule(aten._native_batch_norm_legit.default, "norm")
@jet_rule(aten.cudnn_batch_norm.default, "norm")
def _native_batch_norm(
    pairs: PairSet,
    op: Any,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    y = op(*primals_of((x, weight, bias, mean, var)), training, momentum, eps)
    return _batch_norm(pairs, y, x, weight, bias, mean, var, training or mean is None, eps)


@jet_rule(aten._native_batch_norm_legit.no_stats, "norm")
def _batch_norm_without_statistics(
    pairs: PairSet, op: Any, x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Any:
    y = op(*primals_of((x, weight, bias)), training, momentum, eps)
    return _batch_norm(pairs, y, x, weight, bias, None, None, True, eps)


@jet_rule(aten._batch_norm_with_update.default, "norm")
@jet_rule(aten._batch_norm_no_update.default, "norm")
@jet_rule(aten._native_batch_norm_legit_no_training.default, "norm")
def _batch_norm_by_name(
    pairs: PairSet, op: Any, x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> Any:
    y = op(*primals_of((x, weight, bias, mean, var)), momentum, eps)
    training = op is aten._batch_norm_with_update.default
    return _batch_norm(pairs, y, x, weight, bias, mean, var, training, eps)


# -- weight norm --------------------------------------------------------------------------------------------------


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    others = [d for d in range(v.ndim) if d != dim % v.ndim]
    norm = torch.linalg.vector_norm(v, 2, others, keepdim=True)
    return v * (g / norm), norm


composite(aten._weight_norm_interface, _weight_norm)
