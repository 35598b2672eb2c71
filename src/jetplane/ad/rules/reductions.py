"""Rules of sums, means, products, extrema, norms, softmax and cumulative operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..algebra.families import composite, jet_rule, linear, rejoin
from ..algebra.jet import Operand, PairSet

aten = torch.ops.aten
Axes = int | list[int] | tuple[int, ...] | None

# -- sums ---------------------------------------------------------------------------------------------------------

linear(aten.sum.dim_IntList, dims="dim")
linear(aten.mean.dim, dims="dim")
linear(aten.cumsum, dims="dim")


@jet_rule(aten.sum.default, "linear")
@jet_rule(aten.mean.default, "linear")
def _sum(pairs: PairSet, op: Any, x: Operand, *, dtype: Any = None) -> Operand:
    reduce = torch.sum if op is aten.sum.default else torch.mean

    def lift(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else reduce(rows.reshape(rows.shape[0], x.primal.numel()), 1, dtype=dtype)

    return Operand(op(x.primal, dtype=dtype), lift(x.tangent), lift(x.second))


def _nansum(x: Tensor, dim: Axes = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    clean = torch.where(x.isnan(), 0.0, x)
    return torch.sum(clean, axes(x, dim), keepdim, dtype=dtype)


composite(aten.nansum, _nansum)


def axes(x: Tensor, dim: Axes) -> list[int]:
    """The axes that ``dim`` names: all for None or an empty list."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(x.ndim))
    return [dim] if isinstance(dim, int) else list(dim)


def count(x: Tensor, dim: list[int]) -> int:
    """How many elements a reduction over ``dim`` takes together."""
    return math.prod(x.shape[d] for d in dim) if x.ndim else 1


# -- variance -----------------------------------------------------------------------------------------------------


def _var_mean(x: Tensor, dim: Axes = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    over = axes(x, dim)
    mean = x.mean(over, keepdim=True)
    free = count(x, over) - (1 if correction is None else correction)
    square = squared_size(x - mean)
    var = square.sum(over, keepdim=keepdim) / max(free, 0)
    return var, mean if keepdim else mean.sum(over)


def squared_size(x: Tensor) -> Tensor:
    """|x|^2."""
    if not x.is_complex():
        return x * x
    re, im = torch.view_as_real(x.resolve_conj()).unbind(-1)
    return re * re + im * im


def root(x: Tensor) -> Tensor:
    """sqrt with derivative zero at zero, which is torch's convention for norms and standard deviations."""
    zero = x == 0
    return torch.where(zero, 0.0, torch.sqrt(torch.where(zero, 1.0, x)))


def _std_mean(x: Tensor, dim: Axes = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    var, mean = _var_mean(x, dim, correction=correction, keepdim=keepdim)
    return root(var), mean


composite(aten.var_mean.correction, _var_mean)
composite(aten.std_mean.correction, _std_mean)
composite(aten.var.correction, lambda *a, **k: _var_mean(*a, **k)[0])
composite(aten.std.correction, lambda *a, **k: _std_mean(*a, **k)[0])

# -- norms --------------------------------------------------------------------------------------------------------


def _vector_norm(x: Tensor, ord: Any = 2, dim: Axes = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    over = axes(x, dim)
    size = x.abs()
    if ord == 2:
        return root(squared_size(x).sum(over, keepdim=keepdim))
    if ord == 1:
        return size.sum(over, keepdim=keepdim)
    if ord == 0:
        return (x != 0).sum(over, keepdim=keepdim).to(size.dtype)
    if ord == math.inf:
        return size.amax(over, keepdim=keepdim)
    if ord == -math.inf:
        return size.amin(over, keepdim=keepdim)
    if ord < 1:  # |x|^p has no derivative at zero; torch's convention is zero there
        zero = size == 0
        powers = torch.where(zero, 0.0**ord if ord > 0 else math.inf, torch.where(zero, 1.0, size) ** ord)
    else:
        powers = size**ord
    total = powers.sum(over, keepdim=keepdim)
    flat = (total == 0) | total.isinf()
    return torch.where(flat, total.detach() ** (1 / ord), torch.where(flat, 1.0, total) ** (1 / ord))


composite(aten.linalg_vector_norm, _vector_norm)


def _norm(x: Tensor, p: Any = 2, dim: Axes = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return _vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


composite(aten.norm.ScalarOpt_dim, _norm)
composite(aten.norm.ScalarOpt_dim_dtype, _norm)
composite(aten.norm.Scalar, _norm)
composite(aten.norm.ScalarOpt_dtype, _norm)
composite(aten.dist, lambda a, b, p=2: _vector_norm(a - b, p))


def _renorm(x: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    others = [d for d in range(x.ndim) if d != dim % x.ndim]
    norm = _vector_norm(x, p, others, keepdim=True)
    return x * torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1.0)


composite(aten.renorm, _renorm)

# -- products: by halves, so that zeros are exact ------------------------------------------------------------------


def _product(x: Tensor, dim: int) -> Tensor:
    """Along ``dim``, as a balanced tree of multiplications."""
    while x.shape[dim] > 1:
        half = x.shape[dim] // 2
        pairs = x.narrow(dim, 0, half) * x.narrow(dim, half, half)
        x = torch.cat([pairs, x.narrow(dim, 2 * half, x.shape[dim] - 2 * half)], dim)
    return x


def _prod_dim(x: Tensor, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    if x.ndim == 0:
        return x.clone()
    if x.shape[dim] == 0:
        return x.sum(dim, keepdim) + 1
    out = _product(x, dim)
    return out if keepdim else out.squeeze(dim)


composite(aten.prod.dim_int, _prod_dim)
composite(aten.prod.default, lambda x, *, dtype=None: _prod_dim(x.reshape(-1), 0, dtype=dtype))


def scan(x: Tensor, dim: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The inclusive scan of an associative operation, in log2(n) steps."""
    if x.ndim == 0:
        return x.clone()
    step = 1
    while step < x.shape[dim]:
        rest = x.shape[dim] - step
        x = torch.cat([x.narrow(dim, 0, step), combine(x.narrow(dim, 0, rest), x.narrow(dim, step, rest))], dim)
        step *= 2
    return x


def _cumprod(x: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    return scan(x if dtype is None else x.to(dtype), dim, torch.mul)


composite(aten.cumprod, _cumprod)
composite(aten.logcumsumexp, lambda x, dim: scan(x, dim, torch.logaddexp))

# -- order statistics: the values are gathered ---------------------------------------------------------------------


def _gathered(op: Any, dim_at: int, default: int = -1) -> None:
    """An operation (values, indices) along an axis, where the values are x at the indices."""

    def body(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        values, indices = op(x.detach(), *args, **kwargs)
        dim = kwargs.get("dim", args[dim_at] if len(args) > dim_at else default)
        if x.ndim == 0:
            return x.clone(), indices
        kept = indices if indices.ndim == x.ndim else indices.unsqueeze(dim)
        return x.gather(dim, kept).reshape(values.shape), indices

    composite(op, body)


_gathered(aten.sort.default, 0)
_gathered(aten.topk.default, 1)
_gathered(aten.kthvalue.default, 1)
for _op in (aten.max.dim, aten.min.dim, aten.median.dim, aten.nanmedian.dim, aten.mode.default):
    _gathered(_op, 0)
_gathered(aten.cummax.default, 0)
_gathered(aten.cummin.default, 0)


def _sort_stable(x: Tensor, *, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
    _, indices = aten.sort.stable(x.detach(), stable=stable, dim=dim, descending=descending)
    return (x.gather(dim, indices) if x.ndim else x.clone()), indices


composite(aten.sort.stable, _sort_stable)


def _shared(x: Tensor, y: Tensor, over: list[int], keepdim: bool) -> Tensor:
    """The mean of the elements equal to y: ties share the derivative evenly."""
    chosen = (x == y) | (x.isnan() & y.isnan())
    total = torch.where(chosen, x, 0.0).sum(over, keepdim=keepdim)
    return total / chosen.sum(over, keepdim=keepdim).to(x.dtype)


def _extremum(op: Any) -> None:
    def body(x: Tensor, dim: Axes = (), keepdim: bool = False) -> Tensor:
        over = axes(x, dim)
        return _shared(x, op(x.detach(), over, True), over, keepdim)

    composite(op, body)


_extremum(aten.amax.default)
_extremum(aten.amin.default)
for _op in (aten.max.default, aten.min.default, aten.median.default, aten.nanmedian.default):
    composite(_op, lambda x, op=_op: _shared(x, op(x.detach()), list(range(x.ndim)), False))


def _aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    over: Axes = () if dim is None else [dim]
    return torch.amin(x, over, keepdim), torch.amax(x, over, keepdim)  # type: ignore[arg-type]


composite(aten.aminmax, _aminmax)

# -- softmax family ------------------------------------------------------------------------------------------------
#
# With p = softmax(x) and c_i = x_i - <p, x_i>, the row centred under p:
#   logsumexp     tangent <p, x_i>     second <p, x_ij> + <p, c_i c_j>
#   log_softmax   x less logsumexp
#   softmax       p * c_i,             p * (c_i c_j + x_ij - <p, x_ij> - <p, c_i c_j>)


def _centred(pairs: PairSet, p: Tensor, x: Operand, dim: int) -> tuple[Tensor | None, Tensor | None]:
    """c_i, and x_ij - <p, x_ij> - <p, c_i c_j>; ``dim`` counts the axes of x."""
    axis = dim % x.primal.ndim - x.primal.ndim if x.primal.ndim else -1

    def centre(rows: Tensor) -> Tensor:
        return rows - (p * rows).sum(axis, keepdim=True)

    c = None if x.tangent is None else centre(x.tangent)
    if not pairs.rows:
        return c, None
    second = None if x.second is None else centre(x.second)
    if c is not None:
        spread = pairs.inner(p * c, c, axis)
        second = (-spread).expand(spread.shape[0], *c.shape[1:]) if second is None else second - spread
    return c, second


def _like_vector(x: Operand) -> Operand:
    """A scalar as a vector of one element, so that there is an axis to sum over."""
    if x.primal.ndim:
        return x
    parts = [None if r is None else r.unsqueeze(-1) for r in (x.tangent, x.second)]
    return Operand(x.primal.unsqueeze(-1), *parts)


@jet_rule(aten._log_softmax, "softmax")
def _log_softmax(pairs: PairSet, op: Any, x: Operand, dim: int, half_to_float: bool) -> Operand:
    y = op(x.primal, dim, half_to_float)
    x = _like_vector(x)
    c, second = _centred(pairs, y.exp().reshape(x.primal.shape), x, dim)
    return _shaped(y, c, second)


@jet_rule(aten._softmax, "softmax")
@jet_rule(aten._safe_softmax.default, "softmax")
def _softmax(pairs: PairSet, op: Any, x: Operand, dim: int, *rest: Any, **kwargs: Any) -> Operand:
    y = op(x.primal, dim, *rest, **kwargs)
    x = _like_vector(x)
    p = y.reshape(x.primal.shape)
    c, second = _centred(pairs, p, x, dim)
    if c is not None and second is not None:
        second = second + pairs.outer(c, c)
    return _shaped(y, None if c is None else p * c, None if second is None else p * second)


@jet_rule(aten.logsumexp, "softmax")
def _logsumexp(pairs: PairSet, op: Any, x: Operand, dim: Any, keepdim: bool = False) -> Operand:
    y = op(x.primal, dim, keepdim)
    full = op(x.primal, dim, True)
    p = torch.exp(x.primal - torch.where(full.isinf(), 0.0, full))
    over = [d % x.primal.ndim - x.primal.ndim for d in axes(x.primal, dim)] if x.primal.ndim else []

    def mean(rows: Tensor) -> Tensor:
        return (p * rows).sum(over, keepdim=True) if over else p * rows

    def squeeze(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows.reshape(rows.shape[0], *y.shape)

    tangent = None if x.tangent is None else mean(x.tangent)
    second = None if x.second is None else mean(x.second)
    if pairs.rows and x.tangent is not None and tangent is not None:
        c = x.tangent - tangent
        spread = pairs.inner(p * c, c, over[0]) if len(over) == 1 else mean(pairs.outer(c, c))
        second = spread if second is None else second + spread
    return Operand(y, squeeze(tangent), squeeze(second))


def _shaped(y: Tensor, tangent: Tensor | None, second: Tensor | None) -> Any:
    parts = [None if r is None else r.reshape(r.shape[0], *y.shape) for r in (tangent, second)]
    return rejoin(y, *parts)
