"""What the arguments of ``step`` are: a function with its batch, or closures for the parts of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["parts_of"]


def parts_of(closure: Any, batch: tuple[Any, ...], wanted: str) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Functions and their arguments, whose losses are averaged in a step; what is ``wanted`` of each is for errors."""
    if callable(closure):
        return [(closure, batch)]
    if not isinstance(closure, Sequence):
        name = type(closure).__name__
        raise TypeError(f"step got {name}; expected {wanted}, or a list of closures, one for each part of a batch.")
    if batch:
        raise TypeError("step got a list of closures and a batch; expected closures without arguments.")
    if not closure:
        raise ValueError("step got an empty list of closures; expected at least one.")
    for position, one in enumerate(closure):
        if not callable(one):
            raise TypeError(f"closure {position} of the list is {type(one).__name__}; expected {wanted}.")
    return [(one, ()) for one in closure]
