"""Rules of gathering and scattering. All are linear in the values; indices and masks are constants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedProgram
from ..algebra.families import composite, constant, jet_rule, linear
from ..algebra.jet import Operand, PairSet
from ..algebra.registry import CHOOSES, GATHERS

aten = torch.ops.aten


for _op in (aten.take, aten.masked_select):
    linear(_op)
linear(aten.index_select, dims="dim", traits=GATHERS)
linear(aten._unsafe_masked_index, over=("self", "fill"))
linear(aten.gather, traits=GATHERS)
linear(aten.index_put, over=("self", "values"))
linear(aten._unsafe_index_put, over=("self", "values"))
linear(aten.index_add, over=("self", "source"))
linear(aten.index_copy, over=("self", "source"))
linear(aten.index_fill, over=("self", "value"))
linear(aten.scatter.src, over=("self", "src"))
linear(aten.scatter.value, over=("self", "value"))
linear(aten.scatter_add, over=("self", "src"))
linear(aten.put, over=("self", "source"))
linear(aten.masked_fill, over=("self", "value"), traits=CHOOSES)
linear(aten.masked_scatter, over=("self", "source"))
linear(aten._unsafe_masked_index_put_accumulate, over=("self", "values"))
linear(aten.select_scatter, over=("self", "src"))
linear(aten.slice_scatter, over=("self", "src"))
linear(aten.diagonal_scatter, over=("self", "src"))
composite(aten.copy, lambda x, src, non_blocking=False: src.to(x).expand(x.shape))
composite(aten.fill.Tensor, lambda x, value: value.to(x.dtype).expand(x.shape))
composite(
    aten.as_strided_scatter,
    lambda x, src, size, stride, offset=None: _written(x.clone(), lambda y: y.as_strided(size, stride, offset), src),
)
constant(aten.nonzero, aten.searchsorted, aten.bucketize, aten.histc)


def _written(target: Tensor, view: Callable[[Tensor], Tensor], source: Tensor) -> Tensor:
    """``target`` with ``source`` written through a view of it."""
    view(target).copy_(source)
    return target


@jet_rule(aten.index.Tensor, "linear", GATHERS)
@jet_rule(aten._unsafe_index.Tensor, "linear")
def _index(pairs: PairSet, op: Any, x: Operand, indices: list[Tensor | None]) -> Operand:
    """x[indices] of every row at once; a mask is turned into positions first."""
    y = op(x.primal, indices)
    positions: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            positions.extend(index.nonzero().unbind(-1))
        else:
            positions.append(index)

    def lift(rows: Tensor | None) -> Tensor | None:
        if rows is None:
            return None
        if _leads(positions):
            # the indexed axes' result comes first, and the row axis behind it
            moved = rows.movedim(0, -1)
            return op(moved, positions).movedim(-1, 0)
        return op(rows, [None, *positions])

    return Operand(y, lift(x.tangent), lift(x.second))


def _leads(positions: list[Tensor | None]) -> bool:
    """Whether the result of the indices is put in front: they start at axis 0 or do not stand side by side."""
    used = [axis for axis, index in enumerate(positions) if index is not None]
    return bool(used) and (used[0] == 0 or used[-1] - used[0] + 1 != len(used))


@jet_rule(aten.embedding.default, "linear", GATHERS)
def _embedding(
    pairs: PairSet,
    op: Any,
    weight: Operand,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Operand:
    if scale_grad_by_freq:
        raise UnsupportedProgram("embedding with scale_grad_by_freq=True has no derivative; expected it to be False.")
    padding = (indices == padding_idx).unsqueeze(-1)  # torch gives the padding row no gradient

    def lift(rows: Tensor | None) -> Tensor | None:
        if rows is None:
            return None
        taken = rows.index_select(1, indices.reshape(-1)).reshape(rows.shape[0], *indices.shape, rows.shape[-1])
        return taken if padding_idx < 0 else torch.where(padding, 0.0, taken)

    return Operand(op(weight.primal, indices, padding_idx), lift(weight.tangent), lift(weight.second))


# -- reductions into an index --------------------------------------------------------------------------------------


def _scatter_reduce(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    base = x if include_self else x.scatter(dim, index, _start(reduce, x))
    ones = torch.ones_like(src).detach()
    if reduce == "sum":
        return base.scatter_add(dim, index, src)
    if reduce == "mean":
        count = torch.ones_like(x) if include_self else torch.ones_like(x).scatter(dim, index, 0.0)
        count = count.scatter_add(dim, index, ones)
        return base.scatter_add(dim, index, src) / count.clamp(min=1)
    y = aten.scatter_reduce.two(x.detach(), dim, index, src.detach(), reduce, include_self=include_self)
    if reduce in ("amax", "amin"):
        # ties share the derivative evenly, as torch's backward has it
        mine, theirs = base == y, src == y.gather(dim, index)
        count = mine.to(x.dtype).scatter_add(dim, index, theirs.to(x.dtype))
        kept = torch.where(mine, base, 0.0).scatter_add(dim, index, torch.where(theirs, src, 0.0))
        return kept / count
    return _scatter_product(base, dim, index, src)


def _start(reduce: str, x: Tensor) -> float:
    return {"prod": 1.0, "amax": float("-inf"), "amin": float("inf")}.get(reduce, 0.0)


def _scatter_product(base: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """A product per slot, one factor after the other, so that zeros are exact."""
    out = base
    for position in range(index.shape[dim]):
        where = index.narrow(dim, position, 1)
        factor = src.narrow(dim, position, 1)
        out = out.scatter(dim, where, out.gather(dim, where) * _clip(factor, where))
    return out


def _clip(source: Tensor, index: Tensor) -> Tensor:
    return source[tuple(slice(0, n) for n in index.shape)]


def _scatter_reduce_clipped(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    if index.numel() == 0:
        return x.clone()
    if x.ndim == 0:
        out = _scatter_reduce(x[None], 0, index.reshape(-1), src.reshape(-1), reduce, include_self=include_self)
        return out.reshape(())
    return _scatter_reduce(x, dim, index, _clip(src, index), reduce, include_self=include_self)


def _index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    name = {"mean": "mean", "prod": "prod", "amax": "amax", "amin": "amin"}[reduce]
    if x.ndim == 0:
        return _scatter_reduce_clipped(x, 0, index.reshape(-1), source, name, include_self=include_self)
    shape = [1] * source.ndim
    shape[dim] = -1
    full = index.reshape(shape).expand(source.shape)
    return _scatter_reduce_clipped(x, dim, full, source, name, include_self=include_self)


# torch.nn.functional.embedding calls it on the detached weight: the weight is shortened, and varies as it did
constant(aten.embedding_renorm_.default)
composite(aten.scatter_reduce.two, _scatter_reduce_clipped)
composite(aten.index_reduce, _index_reduce)
_OLD_NAMES = {"add": "sum", "multiply": "prod"}
composite(
    aten.scatter.reduce,
    lambda x, dim, index, src, *, reduce: _scatter_reduce_clipped(x, dim, index, src, _OLD_NAMES[reduce]),
)
composite(
    aten.scatter.value_reduce,
    lambda x, dim, index, value, *, reduce: _scatter_reduce_clipped(
        x, dim, index, x.detach().new_full(index.shape, value), _OLD_NAMES[reduce]
    ),
)


def _segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Any:
    """Neighbours along the first axis, as many to each slot as its length says."""
    given = lengths if lengths is not None else offsets.diff() if offsets is not None else None
    if given is None or given.ndim != 1 or axis != 0:
        return NotImplemented
    slots = torch.repeat_interleave(torch.arange(len(given), device=data.device), given)
    slots = slots.reshape(-1, *(1,) * (data.ndim - 1)).expand(data.shape)
    shape = (len(given), *data.shape[1:])
    start = data.detach().new_full(shape, _EMPTY[reduce] if initial is None else initial)
    if reduce == "mean":  # what it begins with is added, and not counted
        count = given.reshape(-1, *(1,) * (data.ndim - 1)).to(data.dtype)
        total = (start if initial is not None else torch.zeros_like(start)).scatter_add(0, slots, data)
        return torch.where(count > 0, total / count.clamp(min=1), start)
    return _scatter_reduce_clipped(start, 0, slots, data, {"max": "amax", "min": "amin"}.get(reduce, reduce))


_EMPTY = {"sum": 0.0, "mean": math.nan, "prod": 1.0, "max": -math.inf, "min": math.inf}
composite(aten.segment_reduce, _segment_reduce)


def _pack_padded(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The steps of all sequences, the first ones first, and how many sequences are still there at each."""
    steps = x.transpose(0, 1) if batch_first else x
    there = torch.arange(int(lengths[0]))[:, None] < lengths  # longest first
    step, sequence = there.nonzero().unbind(1)
    return steps[step.to(x.device), sequence.to(x.device)], there.sum(1)


composite(aten._pack_padded_sequence, _pack_padded)
