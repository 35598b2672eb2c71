"""Which entries of an activation the losses can depend on at all: not those of tokens that nothing reads.

A class token, or the last one of a sequence, is all that a loss reads of a transformer. In its last layer the other
tokens have no derivative, and noise in them would be noise in the weights' gradients and nothing else. What is read is
known from the operations and their settings alone, whatever the data: from the losses back, each operation says which
entries of its argument the wanted ones of its result depend on. What does not say so depends on all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..adjoints.adjoint import Adjoint, lookup
from ..program.watch import Path
from .noise_plan import Node

__all__ = ["live_entries"]


def live_entries(
    nodes: Iterable[Node], readers: Mapping[int, list[tuple[int, Path | None]]], losses: set[int]
) -> dict[int, Tensor]:
    """By value, where the losses may depend on it; for the values of which they may depend on all there is nothing.

    Truth values that broadcast to the value's shape, with an axis of one where they are the same along it: a batch is
    not written out.
    """
    known: dict[int, Tensor] = {}
    by_number = {node.number: node for node in nodes}
    read = losses | {value for value, those in readers.items() if those}
    firsts = [node.values[0] for node in by_number.values() if node.values]
    for value in reversed(firsts):
        if value in losses:
            continue
        mask = _union([_wanted(by_number[reader], path, known, read) for reader, path in readers.get(value, ())])
        if mask is not None:
            known[value] = _compact(mask)
    return known


def _union(parts: list[Tensor | None]) -> Tensor | None:
    """What any of several readers wants; None for all of it."""
    masks = [part for part in parts if part is not None]
    if not masks or len(masks) < len(parts):
        return None
    mask = functools.reduce(torch.logical_or, masks)
    return None if bool(mask.all()) else mask


def _wanted(reader: Node, path: Path | None, known: Mapping[int, Tensor], read: set[int]) -> Tensor | None:
    """What a node wants of an argument; None for all of it. ``read`` are the values that something reads."""
    adjoint = lookup(reader.func)
    result = _wanted_of_result(reader, adjoint, known, read)
    if adjoint.live is None or path is None or result is None or reader.complex:
        return None
    _, variables, _, settings, *_ = reader.key
    shapes = {place: shape for place, shape, *_ in variables}
    return adjoint.live(result, reader.shape, shapes[path], path, settings)


def _wanted_of_result(reader: Node, adjoint: Adjoint, known: Mapping[int, Tensor], read: set[int]) -> Tensor | None:
    """Which entries of a node's only result are wanted; None where that says nothing of its arguments."""
    if not reader.values or not read.isdisjoint(reader.values[1:]):
        return None
    everything = torch.ones([1] * len(reader.shape), dtype=torch.bool) if adjoint.picks else None
    return known.get(reader.values[0], everything)


def _compact(mask: Tensor) -> Tensor:
    for axis, size in enumerate(mask.shape):
        first = mask.narrow(axis, 0, 1)
        if size > 1 and bool((mask == first).all()):
            mask = first
    return mask.clone()
