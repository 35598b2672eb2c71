"""Constants that lie in a leaf's memory: what was detached from it before the pass began.

Rows belong to storages, and ``target = weight.detach()`` shares the weight's. Made in a pass it is seen to be made;
made before, as targets and caches are, it cannot be told from a view of the weight by where it lies. Backprop takes
what has no graph for a constant, and so does a pass, where it was not made in that pass of what varies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .. import _torch

__all__ = ["EarlierAliases"]


class EarlierAliases:
    """Tells the tensors of a pass from those made before it, in the memory of leaves that others share.

    Nothing is looked at where no memory is shared, as it nearly never is.
    """

    def __init__(self) -> None:
        self.any = False  # whether others share the memory of a leaf
        self._made: weakref.WeakKeyDictionary[Any, dict[int, weakref.ref[Tensor]]] = weakref.WeakKeyDictionary()

    def begin(self, leaf: Tensor) -> None:
        """A leaf is perturbed, or a parameter. Of one that does not require grad backprop says nothing."""
        if _torch.is_fake(type(leaf)) or not leaf.requires_grad or _torch.owns_memory(leaf):
            return
        self.any = True
        self._enter(self._made.setdefault(leaf.untyped_storage(), {}), leaf)

    def note(self, made: Any, given: Iterable[Any]) -> None:
        """An operation has made this of what varies."""
        for tensor in made if isinstance(made, list | tuple) else (made,):
            if isinstance(tensor, Tensor) and not any(tensor is one for one in given):
                known = self._made.get(tensor.untyped_storage())
                if known is not None:
                    self._enter(known, tensor)

    def _enter(self, known: dict[int, weakref.ref[Tensor]], tensor: Tensor) -> None:
        key = id(tensor)
        known[key] = weakref.ref(tensor, lambda _: known.pop(key, None))

    def is_one(self, tensor: Tensor) -> bool:
        """Whether this tensor is a constant in a leaf's memory."""
        if tensor.layout is not torch.strided:
            return False
        known = self._made.get(tensor.untyped_storage())
        if known is None:
            return False
        found = known.get(id(tensor))
        if found is not None and found() is tensor:
            return False
        with _torch.no_function_modes():
            return tensor.grad_fn is None
