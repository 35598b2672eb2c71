"""Rules of torchvision's operations, by name: torchvision is not imported for them.

Pooling of regions is linear in the features, whose channels it treats one by one: rows are further channels. The places
of the regions have no derivative, as in torchvision's own backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..algebra.families import composite, jet_rule, primal_of
from ..algebra.jet import Operand, PairSet


def _by_rows(x: Operand, pool: Callable[[Tensor], Tensor], y: Tensor) -> Operand:
    """The jet of a pooling: rows (R, N, C, H, W) become channels (N, R C, H, W), and come back as (R, *y)."""

    def lift(rows: Tensor | None) -> Tensor | None:
        if rows is None:
            return None
        pooled = pool(rows.movedim(0, 1).flatten(1, 2))
        return pooled.unflatten(1, (rows.shape[0], y.shape[1])).movedim(1, 0)

    return Operand(y, lift(x.tangent), lift(x.second))


@jet_rule("torchvision.roi_align")
def _roi_align(pairs: PairSet, op: Any, x: Any, rois: Any, *options: Any) -> Any:
    rois = primal_of(rois)
    y = op(primal_of(x), rois, *options)
    return _by_rows(x, lambda rows: op(rows, rois, *options), y) if isinstance(x, Operand) else y


@jet_rule("torchvision.ps_roi_align")
@jet_rule("torchvision.ps_roi_pool")
def _ps_roi(pairs: PairSet, op: Any, x: Any, rois: Any, *options: Any) -> Any:
    rois = primal_of(rois)
    y, mapping = op(primal_of(x), rois, *options)
    return (_by_rows(x, lambda rows: op(rows, rois, *options)[0], y) if isinstance(x, Operand) else y), mapping


@jet_rule("torchvision.roi_pool")
def _roi_pool(pairs: PairSet, op: Any, x: Any, rois: Any, *options: Any) -> Any:
    """The largest entry of each bin, read at the places that the values chose."""
    rois = primal_of(rois)
    y, largest = op(primal_of(x), rois, *options)
    if not isinstance(x, Operand):
        return y, largest
    image = rois[:, 0].long()
    place = largest.long().flatten(2)  # (regions, C, bins), in the plane of an image; -1 where a bin is empty

    def lift(rows: Tensor | None) -> Tensor | None:
        if rows is None:
            return None
        planes = rows.flatten(3)[:, image]  # (R, regions, C, H W)
        read = planes.gather(3, place.clamp_min(0).expand(len(rows), *place.shape))
        return torch.where(place < 0, 0, read).unflatten(3, y.shape[2:])

    return Operand(y, lift(x.tangent), lift(x.second)), largest


# -- deformable convolution -----------------------------------------------------------------------------------------


def _deform_conv2d(
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor,
    bias: Tensor,
    *options: Any,
) -> Tensor:
    """Bilinear samples at the moved places, times the mask, and a product with the weight."""
    stride, pad, dilation = options[0:2], options[2:4], options[4:6]
    groups, offset_groups, use_mask = options[6:9]
    kernel = tuple(weight.shape[2:])
    count, channels, height, width = x.shape
    out = tuple(offset.shape[2:])
    # (N, offset groups, kernel places, y or x, rows, columns)
    moved = offset.reshape(count, offset_groups, kernel[0] * kernel[1], 2, *out)
    at = [_grid(axis, kernel, out, stride, pad, dilation, offset) + moved[:, :, :, axis] for axis in (0, 1)]
    grouped = x.reshape(count, offset_groups, channels // offset_groups, height * width)
    columns = _samples(grouped, at[0], at[1], height, width)
    if use_mask:
        columns = columns * mask.reshape(count, offset_groups, 1, -1, *out)
    columns = columns.reshape(count, groups, channels // groups * kernel[0] * kernel[1], *out)
    kernels = weight.reshape(groups, weight.shape[0] // groups, -1)
    y = torch.einsum("ngkhw,gok->ngohw", columns, kernels).flatten(1, 2)
    return y + bias[:, None, None]


def _grid(axis: int, kernel: Any, out: Any, stride: Any, pad: Any, dilation: Any, like: Tensor) -> Tensor:
    """Where each entry of the kernel lies before it is moved, along one axis: (kernel places, rows, columns)."""
    inside = torch.arange(kernel[axis], dtype=like.dtype, device=like.device) * dilation[axis]
    first = torch.arange(out[axis], dtype=like.dtype, device=like.device) * stride[axis] - pad[axis]
    if axis == 0:
        return (inside.repeat_interleave(kernel[1])[:, None] + first)[:, :, None].expand(-1, *out)
    return (inside.repeat(kernel[0])[:, None] + first)[:, None, :].expand(-1, *out)


def _samples(x: Tensor, y_at: Tensor, x_at: Tensor, height: int, width: int) -> Tensor:
    """Bilinear samples of (N, G, C, H W) at places (N, G, P, rows, columns); outside is zero. Channels before P."""
    low = y_at.detach().floor(), x_at.detach().floor()
    share = y_at - low[0], x_at - low[1]
    total: Tensor | None = None
    for up in (0, 1):
        for right in (0, 1):
            row, column = low[0] + up, low[1] + right
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            place = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).long()
            index = place.flatten(2)[:, :, None].expand(-1, -1, x.shape[2], -1)
            read = x.gather(3, index).unflatten(3, place.shape[2:])
            weight = (share[0] if up else 1 - share[0]) * (share[1] if right else 1 - share[1])
            term = read * torch.where(inside, weight, 0)[:, :, None]
            total = term if total is None else total + term
    assert total is not None
    return total


composite("torchvision.deform_conv2d", _deform_conv2d)
