"""Rules of operations that move elements without changing them. Views need none: their rows follow from the storage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..algebra.families import composite, jet_rule, linear, primal_of, primals_of
from ..algebra.jet import Operand, PairSet
from ..algebra.registry import Kind, Rule, add

aten = torch.ops.aten

# Views that their schema does not declare as views: the result shares the argument's storage.
for _op in (
    *(aten._unsafe_view, aten._reshape_alias, aten.lift, aten.lift_fresh),
    *(aten.unsafe_split, aten.unsafe_split_with_sizes, aten.unsafe_chunk),
):
    add(_op, Rule("view", Kind.VIEW, primal_of))

for _op in (
    *(aten.alias_copy, aten.diagonal_copy, aten.expand_copy, aten.permute_copy, aten.select_copy),
    *(aten.slice_copy, aten.squeeze_copy, aten.t_copy, aten.transpose_copy, aten.unfold_copy, aten.unsqueeze_copy),
    *(aten.view_copy, aten._reshape_copy, aten.narrow_copy, aten.split_copy, aten.split_with_sizes_copy),
    *(aten.detach_copy, aten.flip, aten.roll),
    *(aten.repeat, aten.rot90, aten.diag_embed, aten.tril, aten.triu, aten.block_diag, aten.channel_shuffle),
    *(aten.pixel_shuffle, aten.pixel_unshuffle, aten.im2col, aten.col2im, aten.trace, aten.diff),
    *(aten.select_backward, aten.slice_backward, aten.diagonal_backward, aten.unfold_backward, aten.trace_backward),
):
    linear(_op)

# of the storage, not of the tensor: a row of rows has none of its own
composite(
    aten.as_strided_copy, lambda x, size, stride, offset=None, **kw: _strided(x, size, stride, offset, **kw).clone()
)
composite(aten.unbind_copy, lambda x, dim=0: [part.clone() for part in x.unbind(dim)])
linear(aten.stack, over="tensors", dims="dim")
linear(aten.constant_pad_nd, over=("self", "value"))

for _name in ("reflection_pad", "replication_pad"):
    for _d in (1, 2, 3):
        linear(getattr(aten, f"{_name}{_d}d"))
linear(aten._pad_circular)


def _strided(x: Tensor, size: Any, stride: Any, offset: int | None, *, storage_offset: int | None = None) -> Tensor:
    return x.as_strided(size, stride, storage_offset if offset is None else offset)


@jet_rule(aten._to_copy, "linear")
def _to_copy(pairs: PairSet, op: Any, x: Operand, *, memory_format: Any = None, **options: Any) -> Any:
    y = op(x.primal, memory_format=memory_format, **options)
    if not (y.is_floating_point() or y.is_complex()):
        return y
    parts = (x.tangent, x.second)
    return Operand(y, *(None if rows is None else rows.to(y.device, y.dtype) for rows in parts))


@jet_rule(aten.clone, "linear")
def _clone(pairs: PairSet, op: Any, x: Operand, *, memory_format: Any = None) -> Operand:
    return Operand(op(x.primal, memory_format=memory_format), x.tangent, x.second)


@jet_rule(aten.cat, "linear")
def _cat(pairs: PairSet, op: Any, tensors: list[Any], dim: int = 0) -> Operand:
    y = op(primals_of(tensors), dim)
    # torch skips tensors of shape (0,) whatever the others' shape
    kept = [t for t in tensors if primal_of(t).ndim == y.ndim]

    def lift(part: str, count: int) -> Tensor | None:
        rows = [getattr(t, part) if isinstance(t, Operand) else None for t in kept]
        if all(r is None for r in rows):
            return None
        full = [
            primal_of(t).new_zeros(()).expand(count, *primal_of(t).shape) if r is None else r
            for t, r in zip(kept, rows, strict=True)
        ]
        return torch.cat(full, dim % y.ndim + 1)

    return Operand(y, lift("tangent", pairs.k), lift("second", pairs.rows) if pairs.rows else None)
