"""Running a program more than once inside one traced function: the twin of :mod:`.replay`.

A tracer cannot put a random state back. It need not: what the first run drew is a tensor of the same graph, and later
runs are given that. Memory that the program writes is copied before the first run, and put back before later ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import CaptureFailed
from .. import _torch
from ..draws import draws
from ..engine.interpreter import JetMode

__all__ = ["ReplayTraced"]

aten = torch.ops.aten


class ReplayTraced:
    """Calls programs so that each sees the random numbers and the memory that the first one saw.

    ``written`` are the tensors from outside the program that it writes. After the last call they are as after a single
    run.
    """

    watches = True  # every run: the numbers that are drawn are told to it alone

    def __init__(self, written: Sequence[Tensor]) -> None:
        self._written = written
        self._before: list[Tensor] | None = None
        self._draws = _Draws()
        self.in_turn = False  # whether a compiler is to keep the order that things are done in
        self.after: Tensor | None = None  # (): what comes next is done once it is there

    def run(self, program: Callable[[], Any], mode: JetMode | None = None) -> Any:
        """The program's result, as on the first run. Also the parts that the ``mode`` runs operations as may draw."""
        if self._before is None:
            self._before = [tensor.clone() for tensor in self._written]
        else:
            self.rewind()
        with self._draws.once():
            return program()

    def rewind(self) -> None:
        """Put memory back to what the first run found."""
        for tensor, before in zip(self._written, self._before or (), strict=False):
            tensor.copy_(before)

    def then(self, tensor: Tensor) -> None:
        """What comes next is done after ``tensor`` was made. One number of it says when, and nothing is kept of it."""
        if self.in_turn and tensor.numel():
            self.after = tensor[(0,) * tensor.ndim]

    def hold_back(self, tensor: Tensor) -> None:
        """What reads a value from here on is done after that: it depends on it, for all that a compiler can tell."""
        if self.after is not None and all(stride for stride in tensor.stride()):
            tensor.copy_(torch.where(self.after == self.after, tensor, tensor))

    @property
    def wrote(self) -> bool:
        """Whether a run has written to memory from outside the program."""
        return bool(self._written)

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """What runs inside is no part of the program."""
        before, self._draws.paused = self._draws.paused, True
        try:
            yield
        finally:
            self._draws.paused = before


class _Draws(_torch.DispatchMode):
    """Notes what the operations that draw random numbers gave in the first run, and gives it again in later ones."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[Any, Any]] = []  # of the first run, in order: the operation, and what it drew
        self._next: int | None = None  # in a later run: which one comes
        self.paused = False

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """One run of the program."""
        with self:
            yield
        if self._next is not None and self._next != len(self._noted):
            raise CaptureFailed("it drew other random numbers when it was run again")
        self._next = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or not draws(func, args, kwargs):
            return func(*args, **kwargs)
        if self._next is None:
            out = func(*args, **kwargs)
            self._noted.append((func, _drawn(func, args, out)))
            return out
        if self._next == len(self._noted) or self._noted[self._next][0] is not func:
            raise CaptureFailed(f"it drew other random numbers when it was run again, by {func}")
        drawn = self._noted[self._next][1]
        self._next += 1
        return _again(func, args, drawn)


def _drawn(func: Any, args: Any, out: Any) -> Any:
    """What of a result is random, and no function of what may carry tangents."""
    if func is aten.native_dropout.default:
        return out[1]
    if func.overloadpacket in (*_PURE, *_FILLS):
        return out.clone()
    raise CaptureFailed(f"{func} draws random numbers, and what it draws cannot be given to a second pass")


def _again(func: Any, args: Any, drawn: Any) -> Any:
    """The operation's result with what was drawn before."""
    if func is aten.native_dropout.default:
        value, chance, training = args
        scale = 1.0 if training is False else 0.0 if chance == 1 else 1 / (1 - chance)
        return value * drawn * scale, drawn.clone()
    if func.overloadpacket in _FILLS:
        return args[0].copy_(drawn)
    return drawn.clone()


# whose results have no derivative by anything
_PURE = (
    *(aten.rand, aten.randn, aten.randint, aten.randperm, aten.rand_like, aten.randn_like, aten.randint_like),
    *(aten.bernoulli, aten.multinomial),
)
_FILLS = (aten.bernoulli_, aten.uniform_, aten.normal_, aten.exponential_, aten.random_)  # their first argument
