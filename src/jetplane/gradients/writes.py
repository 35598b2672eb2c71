"""Which memory was written since when, element by element as far as shapes and strides tell."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from ..ad.rows import Geometry, geometry

__all__ = ["Writes", "apart"]


class Writes:
    """The writes to each storage, in order."""

    def __init__(self) -> None:
        self._places: weakref.WeakKeyDictionary[Any, list[Geometry]] = weakref.WeakKeyDictionary()  # by storage

    def note(self, tensor: Tensor) -> None:
        """``tensor`` is written."""
        self._places.setdefault(tensor.untyped_storage(), []).append(geometry(tensor))

    def count(self, tensor: Tensor) -> int:
        """How many writes its memory has seen."""
        return len(self._places.get(tensor.untyped_storage(), ()))

    def touched(self, tensor: Tensor, since: int) -> bool:
        """Whether a write after the first ``since`` ones may have changed an element of ``tensor``."""
        here = geometry(tensor)
        return not all(apart(here, place) for place in self._places.get(tensor.untyped_storage(), [])[since:])


def apart(one: Geometry, other: Geometry) -> bool:
    """Whether two views of one storage have no element in common; False where that cannot be told.

    Columns of a matrix and the like, with the same strides, are boxes in the same grid of places:

    Example:
        >>> import torch
        >>> left, middle, right = map(geometry, torch.zeros(4, 6).split(2, 1))
        >>> apart(left, right), apart(middle, right), apart(right, right)
        (True, True, False)
    """
    if 0 in one[0] or 0 in other[0] or _last(one) < other[2] or _last(other) < one[2]:
        return True
    if len(one[0]) != len(other[0]):
        return False
    axes = []
    for n, m, stride, its in zip(one[0], other[0], one[1], other[1], strict=True):
        if n == m == 1:
            continue
        if stride != its or stride <= 0:
            return False
        axes.append((stride, n, m))
    left, right, room, found = one[2], other[2], None, False
    for stride, n, m in sorted(axes, reverse=True):
        (here, left), (there, right) = divmod(left, stride), divmod(right, stride)
        # places are told apart by these digits only where none is carried over to the next
        if room is not None and max(here + n, there + m) * stride > room:
            return False
        found = found or here + n <= there or there + m <= here
        room = stride
    return found or left != right


def _last(place: Geometry) -> int:
    shape, strides, offset = place
    return offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
