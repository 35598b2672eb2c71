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

from .. import _torch
from ..storage_geometry import written

_SEVERAL = (list, tuple)
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
            storage.copy_(saved)

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
            storage.copy_(contents)

    def _save(self, storage: Any) -> None:
        """Keep what a storage holds, unless the program has made it."""
        if storage not in self._born and storage not in self._saved:
            self._saved[storage] = storage.clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        for tensor in written(func, args, kwargs):
            if tensor.layout is torch.strided:
                self._save(tensor.untyped_storage())
        out = func(*args, **kwargs)
        for storage in _storages((out,)):
            if storage not in self._born and not any(storage is one for one in _storages((args, kwargs))):
                self._born[storage] = True
        return out


def _storages(values: Iterable[Any]) -> Iterator[Any]:
    """Those of all strided tensors. By hand: torch's trees take longer than a small operation."""
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                yield value.untyped_storage()
        elif isinstance(value, _SEVERAL):
            yield from _storages(value)
        elif isinstance(value, dict):
            yield from _storages(value.values())
