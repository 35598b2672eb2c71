"""Running a program more than once as if it had run once.

Chunks of directions, and later steps that evaluate a closure again, must see the same random numbers and the same
buffers. A :class:`Replay` keeps what the first run found, and puts it back before each further one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from . import _torch

_BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm")


class Replay:
    """Calls programs so that each sees the random state and the memory that the first one saw.

    After the last call, buffers and random state are as after a single run.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._cuda = sorted({d.index or 0 for d in devices if d.type == "cuda"})
        self._random: tuple[Tensor, list[Tensor]] | None = None
        self._writes = _Writes()

    def run(self, program: Callable[[], Any]) -> Any:
        """The program's result, as on the first run."""
        if self._random is None:
            self._random = torch.get_rng_state(), [torch.cuda.get_rng_state(i) for i in self._cuda]
        else:
            self.rewind()
        with self._writes:
            return program()

    def rewind(self) -> None:
        """Put random state and memory back to what the first run found."""
        if self._random is None:
            return
        cpu, cuda = self._random
        torch.set_rng_state(cpu)
        for index, state in zip(self._cuda, cuda, strict=True):
            torch.cuda.set_rng_state(state, index)
        self._writes.restore()


class _Writes(_torch.DispatchMode):
    """Saves the contents of every storage from outside the program before its first write."""

    def __init__(self) -> None:
        super().__init__()
        self._born: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._saved: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def restore(self) -> None:
        for storage, contents in self._saved.items():
            storage.copy_(contents)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _written(func, args, kwargs):
            storage = tensor.untyped_storage()
            if storage not in self._born and storage not in self._saved:
                self._saved[storage] = storage.clone()
        out = func(*args, **kwargs)
        inputs = {id(t.untyped_storage()) for t in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if id(storage) not in inputs:
                self._born[storage] = True
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [
        leaf for leaf in _torch.pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout is torch.strided
    ]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    if func.overloadpacket.__name__ in _BATCH_NORMS:
        return _tensors((args[3:5], kwargs))  # running statistics, which the schema does not declare
    if not func._schema.is_mutable:
        return []
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += _tensors(value)
    return found
