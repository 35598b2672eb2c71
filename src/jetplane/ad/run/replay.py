"""Running a program more than once as if it had run once.

Chunks of directions, and later steps that evaluate a closure again, must see the same random numbers and the same
buffers. A :class:`Replay` keeps what the first run found, and puts it back before each further one.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import _torch, _torch_distributed
from ..storage_geometry import written

_Random = tuple[Tensor, list[Tensor]]  # of the CPU, and of the CUDA devices in use


class Replay:
    """Calls programs so that each sees the random state and the memory that the first one saw.

    After the last call, buffers and random state are as after a single run.
    """

    watches = False  # a run that nothing comes after need not be told to it

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._cuda = sorted({d.index or 0 for d in devices if d.type == "cuda"})
        self._random: _Random | None = None
        self._writes = _Writes()
        self._kept: tuple[_Random, list[tuple[Any, Any]]] | None = None

    def run(self, program: Callable[[], Any]) -> Any:
        """The program's result, as on the first run."""
        if self._random is None:
            self._random = self._random_state()
        else:
            self.rewind()
        with self._writes:
            return program()

    def rewind(self) -> None:
        """Put random state and memory back to what the first run found."""
        if self._random is not None:
            self._set_random_state(self._random)
            self._writes.restore()

    def keep(self) -> None:
        """Remember memory and random state as the last run left them, for further runs are only trials."""
        self._kept = self._random_state(), self._writes.contents()

    def settle(self) -> None:
        """Put memory and random state back to what was kept."""
        if self._kept is None:
            return
        random, contents = self._kept
        self.rewind()  # also what only a trial has written
        self._set_random_state(random)
        for storage, saved in contents:
            _put_back(storage, saved)

    @property
    def wrote(self) -> bool:
        """Whether a run has written to memory from outside the program."""
        return bool(self._writes._saved)

    def wrote_to(self, tensor: Tensor) -> bool:
        """Whether a run has written to the memory of a tensor from outside the program."""
        return tensor.untyped_storage() in self._writes._saved

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside, writes are not looked for, which is faster where there are none."""
        before, self._writes.paused = self._writes.paused, True
        try:
            yield
        finally:
            self._writes.paused = before

    def _random_state(self) -> _Random:
        return torch.get_rng_state(), [torch.cuda.get_rng_state(index) for index in self._cuda]

    def _set_random_state(self, state: _Random) -> None:
        cpu, cuda = state
        torch.set_rng_state(cpu)
        for index, one in zip(self._cuda, cuda, strict=True):
            torch.cuda.set_rng_state(one, index)


class _Writes(_torch.DispatchMode):
    """Saves the contents of every storage from outside the program before its first write."""

    def __init__(self) -> None:
        super().__init__()
        self._born: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._saved: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.paused = False

    def contents(self) -> list[tuple[Any, Any]]:
        """The storages that were written, with copies of what they hold now."""
        return [(storage, storage.clone()) for storage in self._saved]

    def restore(self) -> None:
        """Put back what the storages held before their first write."""
        for storage, contents in self._saved.items():
            _put_back(storage, contents)

    def _save(self, storage: Any) -> None:
        """Keep what a storage holds, unless the program has made it."""
        if storage not in self._born and storage not in self._saved:
            self._saved[storage] = storage.clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(map(_torch_distributed.is_wrapper, types)):
            return NotImplemented  # what is done to the tensors inside is seen
        if self.paused:
            return func(*args, **kwargs)
        for tensor in written(func, args, kwargs):
            if tensor.layout is torch.strided:
                self._save(tensor.untyped_storage())
        out = func(*args, **kwargs)
        inputs = {id(t.untyped_storage()) for t in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if id(storage) not in inputs:
                self._born[storage] = True
        return out


def _put_back(storage: Any, contents: Any) -> None:
    """What a storage held, unless it was freed since: what FSDP gathers for a use is gathered anew."""
    if storage.nbytes() == contents.nbytes():
        storage.copy_(contents)


def _tensors(tree: Any) -> list[Tensor]:
    return [
        leaf for leaf in _torch.pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout is torch.strided
    ]
