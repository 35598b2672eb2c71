"""Rules of operations that move elements without changing them. Views need none: their rows follow from the storage."""

from __future__ import annotations

import torch

from ..families import linear, primal_of
from ..registry import Kind, Rule, add

aten = torch.ops.aten

# Views that their schema does not declare as views: the result shares the argument's storage.
for _op in (aten._unsafe_view, aten._reshape_alias, aten.lift, aten.lift_fresh):
    add(_op, Rule("view", Kind.VIEW, primal_of))

for _op in (
    *(aten.alias_copy, aten.as_strided_copy, aten.diagonal_copy, aten.expand_copy, aten.permute_copy, aten.select_copy),
    *(aten.slice_copy, aten.squeeze_copy, aten.t_copy, aten.transpose_copy, aten.unfold_copy, aten.unsqueeze_copy),
    *(aten.view_copy, aten._reshape_copy, aten.narrow_copy, aten.split_copy, aten.split_with_sizes_copy),
    *(aten.unbind_copy, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.detach_copy),
    *(aten.repeat, aten.rot90, aten.diag_embed, aten.tril, aten.triu, aten.block_diag, aten.channel_shuffle),
    *(aten.pixel_shuffle, aten.pixel_unshuffle, aten.im2col, aten.col2im, aten.trace, aten.diff),
    *(aten.select_backward, aten.slice_backward, aten.diagonal_backward, aten.unfold_backward, aten.trace_backward),
):
    linear(_op)

linear(aten.flip, dims="dims")
linear(aten.roll)
linear(aten.cat, over="tensors", dims="dim")
linear(aten.stack, over="tensors")
linear(aten.constant_pad_nd, over=("self", "value"))

for _name in ("reflection_pad", "replication_pad"):
    for _d in (1, 2, 3):
        linear(getattr(aten, f"{_name}{_d}d"))
linear(aten._pad_circular)


