"""Which entries of an activation the losses can depend on at all: not those of tokens that nothing reads.

A class token, or the last one of a sequence, is all that a loss reads of a transformer. In its last layer the other
tokens have no derivative, and noise in them would be noise in the weights' gradients and nothing else. What is read is
known from the operations and their settings alone, whatever the data: from the losses back, each operation says which
entries of its argument the wanted ones of its result depend on. What is not listed here depends on all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ad.rules.attention import KERNELS
from .plan import Node
from .watch import Path, is_elementwise

__all__ = ["live_entries"]

aten = torch.ops.aten

# of the wanted entries of the result, its shape, that of the argument, which one it is, and the settings: those of it
Back = Callable[[Tensor, torch.Size, torch.Size, Path, Sequence[Any]], Tensor | None]


def live_entries(
    nodes: Iterable[Node], readers: Mapping[int, list[tuple[int, Path | None]]], losses: set[int]
) -> dict[int, Tensor]:
    """By value, where the losses may depend on it; for the values of which they may depend on all there is nothing.

    Truth values that broadcast to the value's shape, with an axis of one where they are the same along it: a batch is
    not written out.
    """
    known, by_number = dict[int, Tensor](), {node.number: node for node in nodes}
    single = {n for n, node in by_number.items() if not any(readers.get(v) or v in losses for v in node.values[1:])}
    for node in reversed(by_number.values()):
        for value in node.values[:1]:
            parts = [
                _wanted(by_number[reader], path, known) if reader in single and value not in losses else None
                for reader, path in readers.get(value, ())
            ]
            masks = [part for part in parts if part is not None]
            if masks and len(masks) == len(parts):
                union = functools.reduce(torch.logical_or, masks)
                if not bool(union.all()):
                    known[value] = _compact(union)
    return known


def _wanted(reader: Node, path: Path | None, known: Mapping[int, Tensor]) -> Tensor | None:
    """What a node of one result wants of an argument; None for all of it."""
    back = _back(reader.func)
    if back is None or path is None or not reader.values:
        return None
    _, variables, _, settings, *_ = reader.key
    shapes = {place: shape for place, shape, *_ in variables}
    result = known.get(reader.values[0])
    if result is None and reader.func.overloadpacket not in _PARTS:
        return None
    result = torch.ones([1] * len(reader.shape), dtype=torch.bool) if result is None else result
    return back(result, reader.shape, shapes[path], path, settings)


def _back(func: Any) -> Back | None:
    if func in KERNELS:
        return _rows(0)  # a query is read for its own token; keys and values for all
    return _TABLE.get(func.overloadpacket) or (_elementwise if is_elementwise(func) else None)


def _compact(mask: Tensor) -> Tensor:
    for axis, size in enumerate(mask.shape):
        first = mask.narrow(axis, 0, 1)
        if size > 1 and bool((mask == first).all()):
            mask = first
    return mask.clone()


def _elementwise(wanted: Tensor, made: torch.Size, shape: torch.Size, path: Path, settings: Any) -> Tensor | None:
    return wanted if made == shape else None  # what is broadcast may be read anywhere


def _part(operation: Any) -> Back:
    """Of ``select`` and ``slice``: the same part of a mask is filled in."""

    def back(wanted: Tensor, made: torch.Size, shape: torch.Size, path: Path, settings: Sequence[Any]) -> Tensor:
        axis = (settings[1] if len(settings) > 1 else 0) % len(shape)
        sizes = list(wanted.shape)
        sizes[axis : axis + len(made) + 1 - len(shape)] = [shape[axis]]  # select has taken that axis away
        mask = torch.zeros(sizes, dtype=torch.bool)
        operation(mask, *settings[1:]).copy_(wanted)
        return mask

    return back


def _turned(operation: Any) -> Back:
    """Of an operation that puts axes into another order."""

    def back(wanted: Tensor, made: torch.Size, shape: torch.Size, path: Path, settings: Sequence[Any]) -> Tensor:
        order = operation(torch.empty(tuple(range(len(shape))), device="meta"), *settings[1:]).shape  # axis by axis
        return wanted.permute([list(order).index(axis) for axis in range(len(shape))])

    return back


def _reshaped(wanted: Tensor, made: torch.Size, shape: torch.Size, path: Path, settings: Any) -> Tensor:
    if made[-1:] == shape[-1:] and wanted.shape[-1:] == (1,):
        made, shape = torch.Size([*made[:-1], 1]), torch.Size([*shape[:-1], 1])
    return wanted.expand(made).reshape(shape)


def _rows(place: int) -> Back:
    """Of what is done to each row of the argument at ``place`` by itself: it is read for the same row of the result."""

    def back(wanted: Tensor, made: torch.Size, shape: torch.Size, path: Path, settings: Sequence[Any]) -> Tensor | None:
        return wanted.any(-1, keepdim=True) if path == (place,) else None

    return back


def _normalised(
    wanted: Tensor, made: torch.Size, shape: torch.Size, path: Path, settings: Sequence[Any]
) -> Tensor | None:
    return wanted.any(-1, keepdim=True) if path == (0,) and len(settings[1]) == 1 else None


def _softmax(wanted: Tensor, made: torch.Size, shape: torch.Size, path: Path, settings: Sequence[Any]) -> Tensor:
    return wanted.any(settings[1], keepdim=True)


_PARTS = {aten.select, aten.slice}  # that read a part of their argument, though all of the result is wanted
_TABLE: dict[Any, Back] = {
    **{op: _part(op) for op in _PARTS},
    **{op: _turned(op) for op in (aten.transpose, aten.permute, aten.t)},
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.unsqueeze, aten.squeeze, aten.clone, aten.alias), _reshaped),
    **{aten.mm: _rows(0), aten.bmm: _rows(0), aten.addmm: _rows(1)},
    **{aten.native_layer_norm: _normalised, aten._fused_rms_norm: _normalised, aten._softmax: _softmax},
}
