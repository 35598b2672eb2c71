"""Running a program more than once as if it had run once.

Chunks of directions, and later steps that evaluate a closure again, must see the same random numbers and the same
buffers. A :class:`Replay` keeps what the first run found, and puts it back before each further one.
"""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch, _torch_distributed
from ..engine.interpreter import JetMode
from ..storage_geometry import strided, written
from .rebound import Rebound


class _Random(NamedTuple):
    """What random numbers are drawn from."""

    cpu: Tensor
    cuda: list[Tensor]  # of the devices in use
    python: Any
    numpy: Any  # None where it was not imported


class _Kept(NamedTuple):
    """What a run has left."""

    random: _Random
    contents: list[tuple[Any, Any]]  # storages, and copies of them
    buffers: dict[Any, Any]  # of modules
    drawn: dict[torch.Generator, Tensor]  # the states of generators that were handed over


class Replay:
    """Calls programs so that each sees the random state and the memory that the first one saw.

    After the last call, buffers and random state are as after a single run.
    """

    watches = False  # a run that nothing comes after need not be told to it

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._cuda = sorted({d.index or 0 for d in devices if d.type == "cuda"})
        self._random: _Random | None = None
        self._writes, self._rebound = _Writes(), Rebound()
        self._kept: _Kept | None = None

    def run(self, program: Callable[[], Any], mode: JetMode | None = None) -> Any:
        """The program's result, as on the first run.

        With the ``mode`` that it runs under, what is done there for the program is not looked at: tangents, noise.
        """
        if self._random is None:
            self._random = self._random_state()
        else:
            self.rewind()
        if mode is None:
            with self._writes, self._rebound.watched():
                return program()
        mode.before = self._writes
        with self._rebound.watched():
            return program()

    def rewind(self) -> None:
        """Put random state and memory back to what the first run found."""
        if self._random is not None:
            self._set_random_state(self._random)
            self._rebound.restore()
            self._writes.restore()

    def keep(self) -> None:
        """Remember memory and random state as the last run left them, for further runs are only trials."""
        self._kept = _Kept(
            self._random_state(), self._writes.contents(), self._rebound.contents(), self._writes.states()
        )

    def settle(self) -> None:
        """Put memory and random state back to what was kept."""
        if self._kept is None:
            return
        self.rewind()  # also what only a trial has written
        self._set_random_state(self._kept.random)
        self._rebound.assign(self._kept.buffers)
        for storage, saved in self._kept.contents:
            _put_back(storage, saved)
        for generator, state in self._kept.drawn.items():
            generator.set_state(state)

    def then(self, tensor: Tensor) -> None:
        """What comes next is done after ``tensor`` was made: as it is, anyway."""

    def hold_back(self, tensor: Tensor) -> None:
        """What reads a value from here on is done after that."""

    @property
    def wrote(self) -> bool:
        """Whether a run has written to memory from outside the program."""
        return bool(self._writes._saved or self._rebound.contents())

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
        numpy = sys.modules.get("numpy")
        cuda = [torch.cuda.get_rng_state(index) for index in self._cuda]
        return _Random(
            torch.get_rng_state(), cuda, random.getstate(), None if numpy is None else numpy.random.get_state()
        )

    def _set_random_state(self, state: _Random) -> None:
        torch.set_rng_state(state.cpu)
        for index, one in zip(self._cuda, state.cuda, strict=True):
            torch.cuda.set_rng_state(one, index)
        random.setstate(state.python)
        if state.numpy is not None:
            sys.modules["numpy"].random.set_state(state.numpy)


class _Writes(_torch.DispatchMode):
    """Saves the contents of every storage from outside the program before its first write; generators likewise."""

    def __init__(self) -> None:
        super().__init__()
        self._born: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._saved: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._drawn: dict[torch.Generator, Tensor] = {}  # states before the first use
        self.paused = False

    def states(self) -> dict[torch.Generator, Tensor]:
        """The generators that were used, with their states."""
        return {generator: generator.get_state() for generator in self._drawn}

    def contents(self) -> list[tuple[Any, Any]]:
        """The storages that were written, with copies of what they hold now."""
        return [(storage, storage.clone()) for storage in self._saved]

    def restore(self) -> None:
        """Put back what the storages held before their first write."""
        for storage, contents in self._saved.items():
            _put_back(storage, contents)
        for generator, state in self._drawn.items():
            generator.set_state(state)

    def _save(self, storage: Any) -> None:
        """Keep what a storage holds, unless the program has made it."""
        if storage not in self._born and storage not in self._saved:
            with _torch.undispatched():  # the copy is no part of the program, for other modes
                self._saved[storage] = storage.clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(map(_torch_distributed.is_wrapper, types)):
            return NotImplemented  # what is done to the tensors inside is seen
        if self.paused or type(func) is not _torch.OpOverload:  # of higher order: its bodies are seen where they run
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and generator not in self._drawn:
            self._drawn[generator] = generator.get_state()
        for tensor in written(func, args, kwargs):
            if tensor.layout is torch.strided:
                self._save(tensor.untyped_storage())
        out = func(*args, **kwargs)
        new = [tensor for tensor in strided((out,)) if tensor.untyped_storage() not in self._born]
        if new:
            given = {id(tensor.untyped_storage()) for tensor in strided((args, kwargs))}
            for tensor in new:
                storage = tensor.untyped_storage()
                if id(storage) not in given:
                    self._born[storage] = True
        return out


def _put_back(storage: Any, contents: Any) -> None:
    """What a storage held, unless it was freed since: what FSDP gathers for a use is gathered anew."""
    if storage.nbytes() == contents.nbytes():
        storage.copy_(contents)
