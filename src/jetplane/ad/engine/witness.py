"""What a pass has seen: which storages its operations read or wrote, and their versions.

A tensor that a pass never saw has no rows in it, and neither has a constant; only the one is a zero. A storage that was
written after the pass has rows that are no longer its own.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from ...errors import UnsupportedProgram
from ..storage_geometry import version_of, written

__all__ = ["Witness"]

_SEVERAL = (list, tuple)


class Witness:
    """Notes the storages of a pass, and refuses what does not belong to it."""

    def __init__(self) -> None:
        self._versions: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation has run."""
        self._enter(args)
        self._enter(kwargs.values())
        # what torch makes below autograd, as views are made, has no version yet: that of its storage is known
        self._enter([out], new=True)
        if func._schema.is_mutable:
            for tensor in written(func, args, kwargs):
                storage = _storage(tensor)
                if storage is not None:
                    self._versions[storage] = (
                        version_of(tensor) + 1
                    )  # torch counts the write when the operation returns

    def leaf(self, tensor: Tensor) -> None:
        """A tensor that is perturbed, whether or not the program uses it."""
        self._enter([tensor])

    def _enter(self, values: Any, new: bool = False) -> None:
        for value in values:
            if isinstance(value, Tensor):
                storage = _storage(value)
                if storage is not None and not (new and storage in self._versions):
                    self._versions[storage] = version_of(value)
            elif isinstance(value, _SEVERAL):
                self._enter(value, new)

    def check(self, tensor: Tensor) -> None:
        """Raise unless ``tensor`` is one of the pass, as the pass left it."""
        storage = _storage(tensor)
        if storage is None:
            return
        version = self._versions.get(storage)
        shape = tuple(tensor.shape)
        if version is None:
            raise UnsupportedProgram(
                f"the tensor of shape {shape} was not computed in this pass, so its derivatives are unknown; expected "
                "a tensor that was made inside the block of this perturb."
            )
        if version_of(tensor) != version:
            raise UnsupportedProgram(
                f"the tensor of shape {shape} was written in place after the pass, so its derivatives are those of its "
                "old value; expected it as the pass left it, or the write inside the block."
            )


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # sparse and nested layouts own no single storage
        return None
