"""How many directions travel together in a step: as many as the user says, or as fit into a number of bytes.

To find what fits takes a few passes over the program, so it is remembered for programs that look alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.run.budget import parse_bytes

__all__ = ["Fitting", "ambient", "shapes"]

_KEPT = 64  # kinds of steps whose size is remembered


class Fitting:
    """The chunk sizes of an optimizer with a budget of bytes.

    Example:
        >>> fitting = Fitting("1KiB")
        >>> fitting.size("first", lambda limit: limit // 512), fitting.size("first", lambda limit: 7)
        (2, 2)
    """

    def __init__(self, memory: int | str) -> None:
        self.memory = memory  # as it was given
        self._limit = parse_bytes(memory)
        self._sizes: OrderedDict[Any, int | None] = OrderedDict()

    def size(self, kind: Any, measure: Callable[[int], int | None]) -> int | None:
        """The chunk size of this kind of step: what ``measure`` finds for the budget when it is the first one."""
        if kind not in self._sizes:
            self._sizes[kind] = measure(self._limit)
            if len(self._sizes) > _KEPT:
                self._sizes.popitem(last=False)
        return self._sizes[kind]


def shapes(closures: Sequence[Callable[[], Any]]) -> tuple[Any, ...]:
    """What is known of the batches of closures without running them: shapes and dtypes of the tensors that they hold.

    Those are the arguments of a partial, the variables of a closure, defaults, and globals that its code names.

    Example:
        >>> x = torch.zeros(3)
        >>> shapes([lambda: x.sum()])
        (((3,), torch.float32), None)
    """
    found: list[Any] = []
    for closure in closures:
        tensors = (leaf for leaf in _torch.pytree.tree_leaves(list(_held(closure))) if isinstance(leaf, Tensor))
        found += [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        found.append(None)  # where one ends and the next begins
    return tuple(found)


def _held(func: Any) -> Iterator[Any]:
    while isinstance(func, partial):
        yield from (func.args, func.keywords)
        func = func.func
    func = getattr(func, "__func__", func)  # of a method
    yield from (getattr(func, "__defaults__", None), getattr(func, "__kwdefaults__", None))
    yield from _contents(getattr(func, "__closure__", None) or ())
    code = getattr(func, "__code__", None)
    if code is not None:
        yield from (func.__globals__.get(name) for name in code.co_names)


def _contents(cells: Iterable[Any]) -> Iterator[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue


def ambient(device: torch.device) -> Any:
    """What of torch's state changes how much a program holds: casts."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
