"""Which entries of an activation the losses can depend on at all: not those of tokens that nothing reads.

A class token, or the last one of a sequence, is all that a loss reads of a transformer. In its last layer the other
tokens have no derivative, and noise in them would be noise in the weights' gradients and nothing else. What is read is
known from the operations and their settings alone, whatever the data: from the losses back, each operation says which
entries of its argument the wanted ones of its result depend on. What is not listed here depends on all.
"""

from __future__ import annotations

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
Back = Callable[[Tensor, torch.Size, Path, Sequence[Any]], Tensor | None]


def live_entries(
    nodes: Iterable[Node], readers: Mapping[int, list[tuple[int, Path | None]]], losses: set[int]
) -> dict[int, Tensor]:
    """By value, where the losses may depend on it; for the values of which they may depend on all there is nothing.

    Truth values that broadcast to the value's shape, with an axis of one where they are the same along it.
    """
    known, by_number = dict[int, Tensor](), {node.number: node for node in nodes}
    single = {n for n, node in by_number.items() if not any(readers.get(v) or v in losses for v in node.values[1:])}
    for node in reversed(by_number.values()):
        for value in node.values[:1]:
            parts = [
                _wanted(by_number[reader], path, known) if reader in single and value not in losses else None
                for reader, path in readers.get(value, ())
            ]
            if parts and all(part is not None for part in parts):
                union = torch.stack([part for part in parts if part is not None]).any(0)
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
    result = torch.ones((), dtype=torch.bool) if result is None else result
    return back(result.expand(reader.shape), shapes[path], path, settings)


def _back(func: Any) -> Back | None:
    if func in KERNELS:
        return _attention
    return _TABLE.get(func.overloadpacket) or (_elementwise if is_elementwise(func) else None)


def _compact(mask: Tensor) -> Tensor:
    for axis, size in enumerate(mask.shape):
        first = mask.narrow(axis, 0, 1)
        if size > 1 and bool((mask == first).all()):
            mask = first
    return mask.clone()


def _elementwise(wanted: Tensor, shape: torch.Size, path: Path, settings: Sequence[Any]) -> Tensor | None:
    return wanted if wanted.shape == shape else None  # what is broadcast may be read anywhere


def _moved(operation: Any) -> Back:
    """Of an operation whose result is a view of its argument: the same view of a mask is filled in."""

    def back(wanted: Tensor, shape: torch.Size, path: Path, settings: Sequence[Any]) -> Tensor:
        mask = torch.zeros(shape, dtype=torch.bool)
        operation(mask, *settings[1:]).copy_(wanted)
        return mask

    return back


def _reshaped(wanted: Tensor, shape: torch.Size, path: Path, settings: Sequence[Any]) -> Tensor:
    return wanted.reshape(shape)


def _rows(place: int) -> Back:
    """Of a product with a matrix: a row of the argument at ``place`` is read for the same row of the result."""

    def back(wanted: Tensor, shape: torch.Size, path: Path, settings: Sequence[Any]) -> Tensor | None:
        return wanted.any(-1, keepdim=True).expand(shape) if path == (place,) else None

    return back


def _normalised(wanted: Tensor, shape: torch.Size, path: Path, settings: Sequence[Any]) -> Tensor | None:
    if path != (0,):
        return None
    axes = tuple(range(-len(settings[1]), 0))
    return wanted.any(axes[0], keepdim=True).expand(shape) if len(axes) == 1 else None


def _softmax(wanted: Tensor, shape: torch.Size, path: Path, settings: Sequence[Any]) -> Tensor:
    return wanted.any(settings[1], keepdim=True).expand(shape)


def _attention(wanted: Tensor, shape: torch.Size, path: Path, settings: Sequence[Any]) -> Tensor | None:
    """A query is read for its own token; keys and values for all."""
    return wanted.any(-1, keepdim=True).expand(shape) if path == (0,) else None


_PARTS = {aten.select, aten.slice}  # that read a part of their argument, though all of the result is wanted
_TABLE: dict[Any, Back] = {
    **{op: _moved(op) for op in (aten.select, aten.slice, aten.transpose, aten.permute, aten.t)},
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.unsqueeze, aten.squeeze, aten.clone, aten.alias), _reshaped),
    **{aten.mm: _rows(0), aten.bmm: _rows(0), aten.addmm: _rows(1)},
    **{aten.native_layer_norm: _normalised, aten._fused_rms_norm: _normalised, aten._softmax: _softmax},
}
