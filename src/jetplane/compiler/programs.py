"""The captured programs of one optimizer: kept for a while, or given up with one warning."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..ad import _torch
from ..ad.engine.locate import users_level
from ..errors import CaptureFailed
from .capture import Captured, Graph, Run, identity, single, single_with_aux

__all__ = ["Programs"]

_KEPT = 16
_SETS = 8  # of graphs for one program: of each torch allows as many as its limit says

_TOO_MANY = (
    "is compiled for as many kinds of inputs as torch allows, and is run as it is for any other, which is slow: its "
    "shapes, modes or numbers of Python keep changing. Keep to a few shapes (jetplane.Buckets fills batches up), hand "
    "over numbers that change as tensors, or raise torch._dynamo.config.recompile_limit before the first step."
)


class Programs:
    """By what a program is known by: its graphs, each run by what ``build`` makes of it."""

    def __init__(self, build: Callable[[Graph, Sequence[Tensor]], Run]) -> None:
        self._build = build
        self._captured: OrderedDict[Any, _Sets] = OrderedDict()
        self._full: set[Any] = set()  # those that no further signature is compiled for
        self._failed: dict[Any, set[Any]] = {}  # the forms of a batch that one could not be captured with

    def clear(self) -> None:
        """Forget all of them."""
        self._captured.clear()
        self._full.clear()
        self._failed.clear()

    def gave_up(self, func: Callable[..., Any], setting: Hashable, args: tuple[Any, ...], has_aux: bool) -> bool:
        """Whether a program cannot be captured, as far as that is known, with a batch of this form.

        After two forms with which it could not be, no other one is tried: the first one may have been wrong.
        """
        key = identity(func), setting, has_aux
        failed = self._failed.get(key)
        if not failed:
            return False
        form = form_of(args)
        return form in failed or (len(failed) > 1 and not self._captured[key].knows(form))

    def call(
        self,
        func: Callable[..., Any],
        around: Callable[[Callable[..., Any]], Callable[..., Any]],
        setting: Hashable,
        args: tuple[Any, ...],
        has_aux: bool,
    ) -> tuple[Any, ...] | None:
        """What ``around(func)(*args)`` returns: the result, and aux if there is one.

        None where it has to be run as it is, and nothing was run. ``setting`` is what else tells programs apart.
        """
        if self.gave_up(func, setting, args, has_aux):
            return None
        key = identity(func), setting, has_aux
        program = self._find(key, single_with_aux if has_aux else single)
        try:
            returned = program.call(around(func), args)
        except CaptureFailed as error:
            self._tell(key, form_of(args), getattr(func, "__qualname__", type(func).__name__), error)
            return None
        return returned if has_aux else (returned,)

    def _find(self, key: Any, reading: Callable[..., Any]) -> _Sets:
        if key not in self._captured:
            self._captured[key] = _Sets(self._build, reading)
            if len(self._captured) > _KEPT:
                oldest, _ = self._captured.popitem(last=False)
                self._failed.pop(oldest, None)
        self._captured.move_to_end(key)
        return self._captured[key]

    def _tell(self, key: Any, form: Any, name: str, error: CaptureFailed) -> None:
        """Warn of a program that is run as it is, once."""
        if _is_full(error):  # what is compiled already stays in use
            if key not in self._full:
                self._full.add(key)
                warnings.warn(f"{name} {_TOO_MANY}", stacklevel=users_level())
            return
        if key not in self._failed:
            warnings.warn(f"{name} cannot be compiled and is run as it is: {error}.", stacklevel=users_level())
        self._failed.setdefault(key, set()).add(form)


class _Sets:
    """The graphs of one program, in sets of as many as torch allows.

    A form of the batch that is new, as other lengths of its sequences, may open another set; numbers of Python that
    keep changing may not, for what was compiled for them would never be used again.
    """

    def __init__(self, build: Callable[[Graph, Sequence[Tensor]], Run], reading: Callable[..., Any]) -> None:
        self._make = partial(Captured, build, reading)
        self._sets = [self._make()]
        self._places: dict[Any, Captured] = {}  # by form: the set that has a graph for it

    def knows(self, form: Any) -> bool:
        """Whether there is a graph for such batches."""
        return form in self._places

    def call(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        form = form_of(args)
        known = self._places.get(form)
        try:
            returned = (self._sets[-1] if known is None else known)(func, args)
        except CaptureFailed as error:
            if not _is_full(error) or known is not None or len(self._sets) == _SETS:
                raise
            self._sets.append(self._make())
            returned = self._sets[-1](func, args)
        self._places.setdefault(form, self._sets[-1])
        return returned


def form_of(args: tuple[Any, ...]) -> Any:
    """Shapes and dtypes of the tensors among a program's arguments."""
    leaves, structure = _torch.pytree.tree_flatten(args)
    return structure, *((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves)


def _is_full(error: CaptureFailed) -> bool:
    """Whether a program has as many graphs as torch allows."""
    return type(error.__cause__).__name__ == "FailOnRecompileLimitHit"
