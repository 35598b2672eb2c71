"""From the wanted entries of a result to those of an argument: whatever the data, by shapes and settings alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..program.watch import Path
from .adjoint import Live

__all__ = ["along_axis", "last_axis", "part", "reshaped", "rows", "same_entry", "turned"]


def same_entry(wanted: Tensor, made: torch.Size, shape: torch.Size, path: Path, settings: Any) -> Tensor | None:
    """Of what is done entry by entry."""
    return wanted if made == shape else None  # what is broadcast may be read anywhere


def part(operation: Any) -> Live:
    """Of ``select`` and ``slice``: the same part of a mask is filled in."""

    def back(wanted: Tensor, made: torch.Size, shape: torch.Size, path: Path, settings: Sequence[Any]) -> Tensor:
        axis = (settings[1] if len(settings) > 1 else 0) % len(shape)
        sizes = list(wanted.shape)
        sizes[axis : axis + len(made) + 1 - len(shape)] = [shape[axis]]  # select has taken that axis away
        mask = torch.zeros(sizes, dtype=torch.bool)
        operation(mask, *settings[1:]).copy_(wanted)
        return mask

    return back


def turned(operation: Any) -> Live:
    """Of an operation that puts axes into another order."""

    def back(wanted: Tensor, made: torch.Size, shape: torch.Size, path: Path, settings: Sequence[Any]) -> Tensor:
        order = operation(torch.empty(tuple(range(len(shape))), device="meta"), *settings[1:]).shape  # axis by axis
        return wanted.permute([list(order).index(axis) for axis in range(len(shape))])

    return back


def reshaped(wanted: Tensor, made: torch.Size, shape: torch.Size, path: Path, settings: Any) -> Tensor:
    """Of what keeps the order of entries, in another shape."""
    if made[-1:] == shape[-1:] and wanted.shape[-1:] == (1,):
        made, shape = torch.Size([*made[:-1], 1]), torch.Size([*shape[:-1], 1])
    return wanted.expand(made).reshape(shape)


def rows(place: int) -> Live:
    """Of what is done to each row of the argument at ``place`` by itself: it is read for the same row of the result."""

    def back(wanted: Tensor, made: torch.Size, shape: torch.Size, path: Path, settings: Sequence[Any]) -> Tensor | None:
        return wanted.any(-1, keepdim=True) if path == (place,) else None

    return back


def last_axis(
    wanted: Tensor, made: torch.Size, shape: torch.Size, path: Path, settings: Sequence[Any]
) -> Tensor | None:
    """Of what is done to each vector of the last axis, if it is of no more than that."""
    return wanted.any(-1, keepdim=True) if path == (0,) and len(settings[1]) == 1 else None


def along_axis(wanted: Tensor, made: torch.Size, shape: torch.Size, path: Path, settings: Sequence[Any]) -> Tensor:
    """Of what is done along the axis that the second argument names."""
    return wanted.any(settings[1], keepdim=True)
