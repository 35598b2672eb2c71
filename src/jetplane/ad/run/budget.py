"""How many directions may travel together in a given number of bytes.

The passes themselves are measured, on the first few directions: which storages come and go in a pass does not depend on
the directions' values. What a pass holds is the program's own values, the same for any number of directions, and rows
and what is needed to make them, which grow with the number of directions or, where all pairs are carried, with its
square at most. So one measured pass bounds every larger one, and a larger one is run only where its bound is within the
budget. Where the bound says too little, the next pass that is measured is as large as it allows.

Counted are the storages of tensors, and on CUDA what torch's allocator says where that is more: the workspaces of
libraries are among it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import _torch
from ..algebra.jet import Jet, PairSet
from ..storage_geometry import strided
from .passes import Chunk, chunks
from .replay import Replay

__all__ = ["Trace", "chunk_size_of", "fit", "parse_bytes", "readable"]

log = logging.getLogger("jetplane")

_UNITS = {"": 1, "k": 1, "m": 2, "g": 3, "t": 4}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)
_TRIALS = 4  # passes that are measured to find one size
_WORTH = 1.25  # a size that is not larger by this factor is not worth another pass
_BLOCK = 512  # what torch's CUDA allocator rounds up to


def parse_bytes(memory: int | str) -> int:
    """A number of bytes from itself, or from a text with a unit: KiB, MiB, GiB are powers of 1024, KB, MB, GB of 1000.

    Example:
        >>> parse_bytes("4GiB"), parse_bytes("1.5 MB"), parse_bytes(100)
        (4294967296, 1500000, 100)
    """
    expected = "expected a positive number of bytes, or a text such as '4GiB' or '512 MB'"
    if isinstance(memory, bool) or not isinstance(memory, int | str):
        raise TypeError(f"memory is {memory!r}; {expected}.")
    if isinstance(memory, str):
        found = _PATTERN.fullmatch(memory)
        if found is None or (found[3] and not found[2]):
            raise ValueError(f"memory is {memory!r}; {expected}.")
        letter, binary = found[2].lower(), bool(found[3])
        factor = (1024 if binary else 1000) ** _UNITS[letter] if letter else 1
        value = int(float(found[1]) * factor)
    else:
        value = memory
    if value <= 0:
        raise ValueError(f"memory is {memory!r}; {expected}.")
    return value


def readable(count: float) -> str:
    """A number of bytes for people.

    Example:
        >>> readable(3 * 2**30), readable(1500)
        ('3.00 GiB', '1.46 KiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


# -- what a pass holds ------------------------------------------------------------------------------------------------


class Trace:
    """The storages that came and went in a call, in their order.

    Example:
        >>> with Trace.of([]) as trace:
        ...     x = torch.zeros(1000)
        ...     y = x + 1
        ...     del x, y
        ...     z = torch.zeros(10)
        >>> trace.peak(), trace.held
        (8000, 40)
    """

    def __init__(self) -> None:
        self._events: list[tuple[int, int]] = []  # number of the storage, and its bytes, negative where it goes
        self._known: tuple[int, list[tuple[int, int]]] | None = None  # of so many events, the corners
        self.values: set[int] = set()  # numbers of storages that the program itself made
        self.beyond = 0  # of the allocator's peak, beyond that of the storages
        self.held = 0  # at the end
        self.outputs = 0  # bytes of the values that the jets are of

    @classmethod
    @contextlib.contextmanager
    def of(cls, devices: Iterable[torch.device]) -> Iterator[Trace]:
        """What is done inside."""
        trace, cuda = cls(), sorted({device.index or 0 for device in devices if device.type == "cuda"})
        before = [(torch.cuda.memory_allocated(index), torch.cuda.max_memory_allocated(index)) for index in cuda]
        storages = _Storages(trace._events)
        with _Values(storages, trace.values), storages:
            yield trace
        trace._events = list(trace._events)  # what goes from now on is no part of it
        trace.held = sum(size for _, size in trace._events)
        peak = trace.peak()
        for index, (allocated, highest) in zip(cuda, before, strict=True):
            now = torch.cuda.max_memory_allocated(index)
            if now > highest:  # else the peak was not in here
                trace.beyond = max(trace.beyond, now - allocated - int(peak))

    def peak(self, growth: float = 1) -> float:
        """The largest number of bytes at any time; an upper bound of it where rows are ``growth`` times as large."""
        return max((value + growth * row for value, row in self._corners()), default=0) + growth * self.beyond

    def _corners(self) -> list[tuple[int, int]]:
        """Bytes of values and of rows at the times that may be the highest: at no other one there is more of both.

        Of the many operations of a pass these are a few, and a pass asks for the peak of several growths.
        """
        if self._known is None or self._known[0] != len(self._events):
            value = row = most = 0
            times = {(0, 0)}
            for number, size in self._events:
                if number in self.values:
                    value += size
                else:
                    row += size
                times.add((value, row))
            corners = list[tuple[int, int]]()
            for value, row in sorted(times, reverse=True):
                if not corners or row > most:
                    corners.append((value, row))
                    most = row
            self._known = len(self._events), corners
        return self._known[1]


class _Storages(_torch.DispatchMode):
    """Writes down each new storage, and when it is given back. Stands below the engine, and sees what the rules do."""

    def __init__(self, events: list[tuple[int, int]]) -> None:
        super().__init__()
        self._events = events
        self.numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id(tensor.untyped_storage()) for tensor in _tensors(args, kwargs)}
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage in self.numbers or id(storage) in given:
                continue
            number, size = len(self._events), storage.nbytes()
            size = -(-size // _BLOCK) * _BLOCK if tensor.is_cuda else size
            self.numbers[storage] = number
            self._events.append((number, size))
            weakref.finalize(storage, self._events.append, (number, -size)).atexit = False
        return out


class _Values(TorchFunctionMode):
    """Notes which storages the program's own calls return. What is called within a call, the rules do."""

    def __init__(self, storages: _Storages, values: set[int]) -> None:
        super().__init__()
        self._storages = storages
        self._values = values
        self._inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:
            return func(*args, **(kwargs or {}))
        self._inside = True
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            self._inside = False
        for tensor in _tensors(out):
            number = self._storages.numbers.get(tensor.untyped_storage())
            if number is not None:
                self._values.add(number)
        return out


def _tensors(*values: Any) -> list[Tensor]:
    return [tensor for tensor in strided(values) if not _torch.is_functorch_wrapper(tensor)]


# -- how many directions fit ------------------------------------------------------------------------------------------


def chunk_size_of(
    memory: int | str | None,
    chunk_size: int | None,
    pairs: PairSet,
    run: Callable[[Chunk], Any],
    devices: Sequence[torch.device],
    late: bool = False,
) -> int | None:
    """``chunk_size`` as given, or what fits into ``memory``."""
    if memory is None:
        return chunk_size
    if chunk_size is not None:
        raise ValueError(f"chunk_size is {chunk_size} and memory is {memory!r}; expected one of them.")
    return fit(parse_bytes(memory), pairs, run, devices, late)


def fit(
    limit: int,
    pairs: PairSet,
    run: Callable[[Chunk], Any],
    devices: Sequence[torch.device],
    late: bool = False,
    replay: Replay | None = None,
) -> int | None:
    """A chunk size, as large as was found, with which a pass over ``pairs`` holds at most ``limit`` bytes.

    None: all directions fit at once. ``run`` makes one pass over a chunk and returns its jets, a tree; it is called a
    few times, and random state and memory are put back afterwards: by ``replay``, where the caller has one of his own.
    ``late``: second order begins at the loss.
    """
    replay = Replay(devices) if replay is None else replay

    def traced(work: Sequence[Chunk]) -> Trace:
        with Trace.of(devices) as trace:
            jets = [replay.run(partial(run, chunk)) for chunk in work]
        leaves = _torch.pytree.tree_leaves(jets, is_leaf=lambda value: isinstance(value, Jet))
        trace.outputs = sum(jet.primal.nbytes for jet in leaves if isinstance(jet, Jet)) // len(work)
        trace.held //= len(work)
        del jets, leaves
        return trace

    try:
        size, needed = _search(limit, pairs, traced, late)
    finally:
        replay.rewind()
    log.info(
        "chunk_size is %s for %d directions: a pass needs %s of %s",
        *(size, pairs.k, readable(needed), readable(limit)),
    )
    return size


def _search(
    limit: int, pairs: PairSet, traced: Callable[[Sequence[Chunk]], Trace], late: bool
) -> tuple[int | None, float]:
    k, family = pairs.k, _Family(pairs, late)
    whole, needed = _grow(limit, family.least, k, lambda size: traced([family.first(size)]), family.together)
    if whole == k:
        return None, needed
    start = max(1, whole // 2)  # as two blocks of it have been seen to fit
    most = k if late else max(k - 1, 1)
    size, needed = _grow(limit, start, most, lambda size: traced(family.largest(size)), family.apart)
    if size == 0 and start > 1:
        size, needed = _grow(limit, 1, start - 1, lambda size: traced(family.largest(size)), family.apart)
    if size == 0:
        raise ValueError(
            f"memory is {readable(limit)} ({limit} bytes), but one direction at a time needs {readable(needed)} "
            f"({int(needed)} bytes); expected at least as much."
        )
    return (None if size == k else size), needed


def _grow(
    limit: int,
    size: int,
    most: int,
    traced: Callable[[int], Trace],
    bytes_at: Callable[[Trace, int, int], float],
) -> tuple[int, float]:
    """The largest size found that fits, 0 where ``size`` itself does not; and its bytes.

    ``bytes_at(trace, size, larger)`` bounds what ``larger`` takes by the trace of ``size``.
    """
    trace = traced(size)
    needed = bytes_at(trace, size, size)
    if needed > limit:
        return 0, needed
    for _ in range(_TRIALS):
        larger = _last(size, most, limit, partial(bytes_at, trace, size))
        if larger == size:
            break
        if larger == most or larger < _WORTH * size:
            return larger, bytes_at(trace, size, larger)  # bounded, so it need not be measured
        after = traced(larger)
        if bytes_at(after, larger, larger) > limit:
            break  # beyond its bound: a rule does more for more directions
        size, trace = larger, after
    return size, bytes_at(trace, size, size)


def _last(low: int, high: int, limit: int, bytes_at: Callable[[int], float]) -> int:
    """The last number from ``low`` to ``high`` that is within the limit, where none is after one that is not."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bytes_at(middle) <= limit else (low, middle - 1)
    return low


class _Family:
    """The chunks of a pair set for every size, and how what they hold grows."""

    def __init__(self, pairs: PairSet, late: bool) -> None:
        self._whole = pairs
        # of a list, any part may hold more pairs than the rest
        self._pairs = PairSet.all(pairs.k) if pairs.shape == "list" else pairs
        self._late = late
        self._square = self._pairs.shape == "all"
        self._star = self._pairs.shape == "star" and pairs.k > 1
        self.least = 2 if self._star else 1  # directions that have a pair

    def first(self, size: int) -> Chunk:
        """One pass over the first directions, with the pairs among them."""
        (chunk,) = chunks(self._of(size), None, self._late)
        return chunk

    def largest(self, size: int) -> list[Chunk]:
        """What must be run to see the largest chunks: them alone, or all where they hand something on."""
        if self._late:
            return chunks(self._pairs, size, late=True)
        work = chunks(self._of(min(2 * size, self._pairs.k)), size)  # those of more blocks are like those of two
        shapes = {(len(one.rows), one.pairs.rows): one for one in work}
        return [one for shape, one in shapes.items() if not any(_exceeds(other, shape) for other in shapes)]

    def together(self, trace: Trace, size: int, larger: int) -> float:
        """What one pass over ``larger`` directions takes at most, by the trace of one over ``size``."""
        growth = (larger - 1) / (size - 1) if self._star else (larger / size) ** (2 if self._square else 1)
        return self._bytes(1, trace, growth)

    def apart(self, trace: Trace, size: int, larger: int) -> float:
        """What chunks of ``larger`` directions take at most, by the trace of the largest of ``size``."""
        if self._late:
            return trace.peak(larger / size)  # it is the trace of all chunks
        blocks = -(-self._pairs.k // larger)
        count = blocks * (blocks + 1) // 2 if self._square else blocks
        return self._bytes(count, trace, (larger / size) ** (2 if self._square else 1))

    def _bytes(self, count: int, trace: Trace, growth: float) -> float:
        """The largest chunk with the results of the others, or their assembly."""
        others = (count - 1) * growth * trace.held
        result = (self._whole.k + self._whole.rows) * trace.outputs
        return max(trace.peak(growth) + others, others + growth * trace.held + 2 * result)

    def _of(self, k: int) -> PairSet:
        """The set of the first directions alone."""
        whole = self._pairs
        if whole.shape == "all":
            return PairSet.all(k)
        kept = [n for n, pair in enumerate(whole.pairs) if max(pair) < k]
        weights = None if whole.weights is None else tuple(whole.weights[n] for n in kept)
        return PairSet(k, tuple(whole.pairs[n] for n in kept), weights, whole.shape)


def _exceeds(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one != other and one[0] >= other[0] and one[1] >= other[1]
