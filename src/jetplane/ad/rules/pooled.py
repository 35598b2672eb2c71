"""Convolution, ReLU and max-pooling over windows of 2 x 2 as one operation of a program, and its jet from two kernels.

:mod:`jetplane.compiler.fusion` puts the operation into captured programs. Where a kernel does not pay it is what it is
made of. ReLU and pooling keep one number of each four rows of the convolution's jet, so the kernels write that one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import _torch
from ..algebra.families import jet_rule, primal_of
from ..algebra.jet import Operand, PairSet
from ..algebra.registry import lookup
from ..algebra.sparse import SparseOperand
from ..kernels import convolution_kernel as kernel
from ..storage_geometry import geometry

__all__ = ["layer"]

aten = torch.ops.aten

_WINDOW = [2, 2]
_SHORTEST = 128  # numbers in a window up to which they need not come 16 bytes at a time
OFF = 4  # the code of a window none of whose four positions is kept


@torch.library.custom_op("jetplane::convolution_relu_pool", mutates_args=())
def layer(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """max_pool2d(relu(conv2d(x, w, bias, ...)), 2)."""
    y = torch.nn.functional.conv2d(x, w, bias, stride, padding, dilation)
    return torch.nn.functional.max_pool2d(y.relu(), 2).contiguous()


@layer.register_fake
def _(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    n, height, width, channels = _pooled_shape(x.permute(0, 2, 3, 1), w.permute(0, 2, 3, 1), stride, dilation, padding)
    return x.new_empty((n, channels, height, width))


@jet_rule(torch.ops.jetplane.convolution_relu_pool.default, "bilinear")
def _rule(pairs: PairSet, op: Any, x: Any, w: Any, bias: Any, stride: Any, padding: Any, dilation: Any) -> Operand:
    sparse = any(isinstance(one, SparseOperand) for one in (x, w, bias))
    if sparse or not _pays(x, w, bias, stride, padding, dilation):
        return _composed(pairs, x, w, bias, stride, padding, dilation)
    constant = not isinstance(x, Operand) or (x.tangent is None and x.second is None)
    if constant or not pairs.rows:
        return _first_order(x, w, bias, stride, padding, dilation)
    if kernel.pays(pairs, x, w, stride, padding, dilation, 1, False, fewest=1):
        return _second_order(x, w, bias, stride, padding, dilation)
    return _composed(pairs, x, w, bias, stride, padding, dilation)


def _composed(pairs: PairSet, x: Any, w: Any, bias: Any, stride: Any, padding: Any, dilation: Any) -> Operand:
    """By the rules of what the operation is made of."""

    def follow(op: Any, *args: Any) -> Any:
        rule = lookup(op)
        assert rule is not None
        return rule.apply(pairs, op, *args)

    y = follow(aten.convolution.default, x, w, bias, stride, padding, dilation, False, [0, 0], 1)
    support = y.support if isinstance(y, SparseOperand) else None
    if support is not None:  # of so many directions; the rules below do not ask which
        y = Operand(y.primal, y.tangent, None)
    pooled, _ = follow(aten.max_pool2d_with_indices.default, follow(aten.relu.default, y), _WINDOW, _WINDOW)
    return pooled if support is None else SparseOperand(pooled.primal, pooled.tangent, None, support)


def _pays(x: Any, w: Any, bias: Any, stride: Any, padding: Any, dilation: Any) -> bool:
    """Whether value and tangents can come from the kernel, and that is likely to be faster than the library."""
    if not (isinstance(w, Operand) and w.tangent is not None and w.second is None):
        return False
    if isinstance(bias, Operand) and bias.second is not None:
        return False
    value, weight = primal_of(x), w.primal
    if not (_torch.is_fake(type(value)) and kernel.usable(value, weight)):
        return False
    out = _pooled_shape(value.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1), stride, dilation, padding)
    aligned = weight.shape[1] % 4 == 0 or math.prod(weight.shape[1:]) <= _SHORTEST
    return aligned and 4 * math.prod(out[:3]) >= kernel.FEWEST and kernel.fits(value, padding, out)


def _first_order(x: Any, w: Operand, bias: Any, stride: Any, padding: Any, dilation: Any) -> Operand:
    """Value and tangents. What x has of second rows is not there, or not wanted."""
    assert w.tangent is not None
    tangent = x.tangent if isinstance(x, Operand) else None
    rows = primal_of(x).permute(0, 2, 3, 1).unsqueeze(0) if tangent is None else _stacked(primal_of(x), tangent)
    left = kernel.padded(rows, padding).contiguous()
    tf32 = left.dtype == torch.float32 and kernel.tf32()
    right = kernel.channels_last(w.primal, w.tangent)
    value, out, _ = torch.ops.jetplane.convolution_pooled_rows(
        left, kernel.rounded(right) if tf32 else right, kernel.stacked(bias, w), stride, dilation, tf32
    )
    return _operand(value, out, w.tangent.shape[0])


def _second_order(x: Operand, w: Operand, bias: Any, stride: Any, padding: Any, dilation: Any) -> Operand:
    """Value, tangents and all pairs."""
    assert x.tangent is not None and w.tangent is not None
    left = kernel.padded(_stacked(x.primal, x.tangent), padding).contiguous()
    tf32 = left.dtype == torch.float32 and kernel.tf32()
    right = kernel.channels_last(w.primal, w.tangent)
    first = kernel.rounded(right[:1]) if tf32 else right[:1]
    second = None
    if x.second is not None:
        second = kernel.padded(x.second.permute(0, 1, 3, 4, 2), padding).contiguous()
    rows = kernel.stacked(bias, w)
    value, _, codes = torch.ops.jetplane.convolution_pooled_rows(
        left[:1], first, None if rows is None else rows[:1], stride, dilation, tf32
    )
    factors = kernel.factors(left, right, second)
    out = torch.ops.jetplane.convolution_pooled_jet(*factors, rows, codes, stride, dilation)
    return _operand(value, out, w.tangent.shape[0])


def _operand(value: Tensor, rows: Tensor, k: int) -> Operand:
    """The jet of rows (..., N, PH, PW, O), the first one of them the value's again."""
    back = rows.permute(0, 1, 4, 2, 3)
    primal, tangent = value.permute(0, 3, 1, 2), back[1 : k + 1]
    _TOGETHER[tangent] = rows[: k + 1], value, value._version
    return Operand(primal, tangent, back[k + 1 :] if rows.shape[0] > k + 1 else None)


# Rows in one piece, the value first and channels last, by the tangents that are a view of them: what the next layer
# reads, which would otherwise be put together again.
_TOGETHER = WeakTensorKeyDictionary()


def _stacked(primal: Tensor, tangent: Tensor) -> Tensor:
    """Rows (1 + K, N, H, W, C) of a value and its tangents."""
    rows, value, version = _TOGETHER.get(tangent, (tangent, None, 0))
    # the engine's own alias of the value may count writes by itself
    if value is not None and _is(primal.permute(0, 2, 3, 1), value) and value._version == primal._version == version:
        return rows
    return kernel.channels_last(primal, tangent)


def _is(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same memory: y = x + 1 has x's tangents, and another value."""
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and geometry(one) == geometry(other)


# -- the kernels as operations --------------------------------------------------------------------------------------


@torch.library.custom_op("jetplane::convolution_pooled_rows", mutates_args=())
def _rows(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Sequence[int], dilation: Sequence[int], tf32: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Value, rows (T, N, PH, PW, O) and codes from x (1 or T, N, H, W, C), w (T, O, height, width, C), bias (T, O)."""
    shape = _pooled_shape(x[0], w[0], stride, dilation)
    if x.is_cuda:
        from ..kernels.pooled_triton import pooled_rows

        return pooled_rows(x, w, bias, stride, dilation, shape, tf32)
    value = kernel.convolved(x[0], w[0], stride, dilation)
    rows = [value]
    for j in range(1, w.shape[0]):
        row = kernel.convolved(x[0], w[j], stride, dilation)
        rows.append(row if x.shape[0] == 1 else row + kernel.convolved(x[j], w[0], stride, dilation))
    if bias is not None:
        rows = [row + one for row, one in zip(rows, bias, strict=True)]
    largest, place = _fours(rows[0], shape).max(-1)
    codes = torch.where(largest > 0, place, OFF).where(~largest.isnan(), place).to(torch.uint8)
    out = torch.stack([_kept(row, codes) for row in rows])
    return out[0].clone(), out, codes


@_rows.register_fake
def _(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Sequence[int], dilation: Sequence[int], tf32: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shape = _pooled_shape(x[0], w[0], stride, dilation)
    return x.new_empty(shape), x.new_empty((w.shape[0], *shape)), x.new_empty(shape, dtype=torch.uint8)


@torch.library.custom_op("jetplane::convolution_pooled_jet", mutates_args=())
def _jet(
    x: Tensor,
    w: Tensor,
    second: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    codes: Tensor,
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Rows (pairs of T, N, PH, PW, O): what ReLU and pooling keep, by their codes, of ``jetplane::convolution_jet``."""
    if x.is_cuda:
        from ..kernels.convolution_triton import convolve

        shape = _pooled_shape(x[0], w[0], stride, dilation)
        return convolve(x, w, second, scale, bias, stride, dilation, shape, codes)
    rows = torch.ops.jetplane.convolution_jet(x, w, second, scale, bias, stride, dilation)
    return torch.stack([_kept(row, codes) for row in rows])


@_jet.register_fake
def _(
    x: Tensor,
    w: Tensor,
    second: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    codes: Tensor,
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    rows = x.shape[0]
    made = x if scale is None else scale
    return made.new_empty((rows * (rows + 1) // 2, *codes.shape))


def _pooled_shape(
    x: Tensor, w: Tensor, stride: Sequence[int], dilation: Sequence[int], padding: Sequence[int] = (0, 0)
) -> tuple[int, int, int, int]:
    """The shape (N, PH, PW, O) behind x (N, H, W, C) and w (O, height, width, C)."""
    size = [n + 2 * more for n, more in zip(x.shape[1:3], padding, strict=True)]
    height, width = kernel.lengths(size, w.shape[1:3], stride, dilation)
    return x.shape[0], height // 2, width // 2, w.shape[0]


def _fours(row: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """(N, OH, OW, O) as (N, PH, PW, O, 4)."""
    n, height, width, channels = shape
    parts = row[:, : 2 * height, : 2 * width].reshape(n, height, 2, width, 2, channels)
    return parts.permute(0, 1, 3, 5, 2, 4).flatten(4)


def _kept(row: Tensor, codes: Tensor) -> Tensor:
    """What ReLU and pooling keep of a row."""
    n, height, width, channels = codes.shape
    at = codes.clamp(max=OFF - 1).long().unsqueeze(-1)
    found = _fours(row, (n, height, width, channels)).gather(-1, at).squeeze(-1)
    return torch.where(codes == OFF, 0.0, found)
