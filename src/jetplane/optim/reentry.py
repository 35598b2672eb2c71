"""A step inside a closure of the same optimizer's step would move what the outer one is measuring."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["outermost"]

Step = TypeVar("Step", bound=Callable[..., Any])

_STEPPING: set[tuple[int, int]] = set()  # optimizers, by id, and the threads in which they take a step


def outermost(step: Step) -> Step:
    """A method that raises where it is called inside itself, by what it calls.

    Example:
        >>> class Loop:
        ...     @outermost
        ...     def step(self, closure):
        ...         return closure()
        >>> loop = Loop()
        >>> loop.step(lambda: 1)
        1
        >>> loop.step(lambda: loop.step(lambda: 1))
        Traceback (most recent call last):
            ...
        RuntimeError: step of Loop was called by its own closure; expected a closure that computes the loss alone.
    """

    @functools.wraps(step)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        one = id(self), threading.get_ident()
        if one in _STEPPING:
            raise RuntimeError(
                f"step of {type(self).__name__} was called by its own closure; expected a closure that computes the "
                "loss alone."
            )
        _STEPPING.add(one)
        try:
            return step(self, *args, **kwargs)
        finally:
            _STEPPING.discard(one)

    return cast(Step, guarded)
