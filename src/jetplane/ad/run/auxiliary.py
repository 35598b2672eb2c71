"""What a program returns beside its result, where its caller says that it does (``has_aux=True``)."""

from __future__ import annotations

from typing import Any

__all__ = ["split_aux", "told"]


def told(returned: Any) -> str:
    """What was returned in place of a tensor, in words: no numbers of tensors that are in it.

    Example:
        >>> told(1.5), told(None)
        ('float 1.5', 'None')
        >>> told((1.5, "seen"))
        'tuple (a pair of a result and aux needs has_aux=True)'
    """
    if returned is None:
        return "None"
    kind = type(returned).__name__
    if isinstance(returned, tuple) and len(returned) == 2:
        return f"{kind} (a pair of a result and aux needs has_aux=True)"
    return f"{kind} {returned!r}" if isinstance(returned, bool | int | float) else kind


def split_aux(returned: Any, has_aux: bool, source: str = "func", result: str = "output") -> tuple[Any, Any]:
    """The result, and what came with it, None without ``has_aux``; ``source`` returned it and calls it ``result``.

    Example:
        >>> split_aux((1.0, "seen"), True), split_aux(1.0, False)
        ((1.0, 'seen'), (1.0, None))
    """
    if not has_aux:
        return returned, None
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(
            f"{source} returned {type(returned).__name__}; expected a pair ({result}, aux) with has_aux=True."
        )
    return returned
