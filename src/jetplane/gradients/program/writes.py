"""Which memory was written since when, element by element as far as shapes and strides tell."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from ...ad.storage_geometry import Geometry, overlap, place

__all__ = ["Writes"]


class Writes:
    """The writes to each storage, in order."""

    def __init__(self) -> None:
        self._places: weakref.WeakKeyDictionary[Any, list[Geometry]] = weakref.WeakKeyDictionary()  # by storage

    def note(self, tensor: Tensor) -> None:
        """``tensor`` is written."""
        self._places.setdefault(tensor.untyped_storage(), []).append(place(tensor))

    def count(self, tensor: Tensor) -> int:
        """How many writes its memory has seen."""
        return len(self._places.get(tensor.untyped_storage(), ()))

    def touched(self, tensor: Tensor, since: int) -> bool:
        """Whether a write after the first ``since`` ones may have changed an element of ``tensor``."""
        here = place(tensor)
        return any(overlap(here, there) for there in self._places.get(tensor.untyped_storage(), [])[since:])
