"""Operations over rows (R, *S) in place of values (S): by torch.vmap, by a loop, or with their axes moved one up.

The loop is the readable twin of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .jet import Operand
from .registry import argument_names

__all__ = ["Vmapped", "is_jet", "lifted", "looped", "over_rows", "shifted", "vmapped"]


def is_jet(value: Any) -> bool:
    """Whether an argument has rows."""
    return isinstance(value, Operand)


def _is_continuous(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _zero_like(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.new_zeros(()).expand(value.shape) if _is_continuous(value) else torch.zeros_like(value)
    return 0 if isinstance(value, int | float | complex) and not isinstance(value, bool) else value


def _split(op: Any, args: Sequence[Any], kwargs: dict[str, Any], active: set[str], part: str) -> Any:
    """Leaves of the arguments with rows in place of jets, and which leaves are rows."""
    names = argument_names(op)
    leaves: list[Any] = []
    is_row: list[bool] = []
    structure = _torch.pytree.tree_structure((list(args), dict(kwargs)), is_leaf=is_jet)
    named = [*zip(names, args, strict=False), *kwargs.items()]
    for name, argument in named:
        for leaf in _torch.pytree.tree_leaves(argument, is_leaf=is_jet):
            rows = getattr(leaf, part) if isinstance(leaf, Operand) else None
            is_row.append(rows is not None)
            value = leaf.primal if isinstance(leaf, Operand) else leaf
            leaves.append(rows if rows is not None else _zero_like(value) if name in active else value)
    return leaves, is_row, structure


def lifted(op: Any, args: Sequence[Any], kwargs: dict[str, Any], active: set[str], part: str) -> Any:
    """The operation on the rows ``part`` of its arguments, those of ``active`` without rows set to zero."""
    leaves, is_row, structure = _split(op, args, kwargs, active, part)
    if not any(is_row):
        return None
    count = next(leaf.shape[0] for leaf, row in zip(leaves, is_row, strict=True) if row)
    for place, leaf in enumerate(leaves):
        # The zeros of the other operands get rows, too: torch's batching rules are wrong for some operations, as
        # index_fill, where the tensor that is written has none. What is not floating are indices and masks.
        if not is_row[place] and isinstance(leaf, Tensor) and _is_continuous(leaf):
            leaves[place], is_row[place] = leaf.expand(count, *leaf.shape), True
    rows = [leaf for leaf, row in zip(leaves, is_row, strict=True) if row]

    def once(*one: Tensor) -> Any:
        fill = iter(one)
        full = [next(fill) if row else leaf for leaf, row in zip(leaves, is_row, strict=True)]
        positional, keywords = _torch.pytree.tree_unflatten(full, structure)
        return op(*positional, **keywords)

    return over_rows(once, *rows)


def over_rows(function: Callable[..., Any], *rows: Tensor) -> Any:
    """``function`` over the first axis of each of ``rows``: by vmap, and where it cannot be trusted, row by row.

    torch's batching rules take the axis of the rows for one of the tensor where that has none (``roll`` of a number),
    and refuse some calls that are right (``slice_scatter`` with an end behind the last entry). A single row needs none.
    """
    if rows[0].shape[0] == 1 or any(row.ndim == 1 for row in rows):
        return looped(function, *rows)
    try:
        return vmapped(function, *rows)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return looped(function, *rows)


def looped(function: Callable[..., Any], *rows: Tensor) -> Any:
    """``function`` row by row: the readable twin of :func:`vmapped`."""
    outs = [function(*one) for one in zip(*rows, strict=True)]
    if isinstance(outs[0], Tensor):
        return torch.stack(outs)
    return type(outs[0])(map(torch.stack, zip(*outs, strict=True)))


def vmapped(function: Callable[..., Any], *rows: Tensor) -> Any:
    """``function`` over the first axis of each of ``rows``, by torch's batching rules."""
    with _torch.quiet_vmap_fallback():
        return torch.vmap(function)(*rows)


def shifted(op: Any, args: Sequence[Any], kwargs: dict[str, Any], active: set[str], part: str, dims: str) -> Any:
    """The operation on the rows themselves, its axes counted behind the row axis."""
    leaves, is_row, structure = _split(op, args, kwargs, active, part)
    if not any(is_row):
        return None
    count = next(leaf.shape[0] for leaf, row in zip(leaves, is_row, strict=True) if row)
    names = argument_names(op)
    positional, keywords = _torch.pytree.tree_unflatten(leaves, structure)
    bound = dict(zip(names, positional, strict=False)) | keywords
    flags, flag_keywords = _torch.pytree.tree_unflatten(is_row, structure)
    flagged = dict(zip(names, flags, strict=False)) | flag_keywords

    def with_row_axis(value: Any, row: Any) -> Any:
        if isinstance(value, list | tuple):
            return [with_row_axis(v, r) for v, r in zip(value, row, strict=True)]
        return value if row or not isinstance(value, Tensor) else value.expand(count, *value.shape)

    for name in active & bound.keys():
        bound[name] = with_row_axis(bound[name], flagged[name])
    axes = bound.get(dims)
    if axes is None:
        axes = _default_of(op, dims)
    if isinstance(axes, list | tuple) and axes:
        bound[dims] = [axis + 1 if axis >= 0 else axis for axis in axes]
    elif isinstance(axes, int):
        bound[dims] = axes + 1 if axes >= 0 else axes
    else:  # None or []: all axes but the rows'
        first = next(leaf for leaf, row in zip(leaves, is_row, strict=True) if row)
        bound[dims] = list(range(1, first.ndim))
    return _call_bound(op, bound)


def _default_of(op: Any, name: str) -> Any:
    return next(a.default_value for a in op._schema.arguments if a.name == name)


def _call_bound(op: Any, bound: dict[str, Any]) -> Any:
    keyword_only = {a.name for a in op._schema.arguments if a.kwarg_only}
    positional = []
    for argument in op._schema.arguments:
        if argument.kwarg_only:
            break
        positional.append(bound.get(argument.name, argument.default_value))
    return op(*positional, **{name: value for name, value in bound.items() if name in keyword_only})


@dataclass(frozen=True)
class Vmapped:
    """A bilinear function lifted over rows: the readable twin of every hand-written lift."""

    function: Callable[[Tensor, Tensor], Tensor]

    def left(self, a: Tensor, b: Tensor) -> Tensor:
        return over_rows(lambda row: self.function(row, b), a)

    def right(self, a: Tensor, b: Tensor) -> Tensor:
        return over_rows(lambda row: self.function(a, row), b)

    def paired(self, a: Tensor, b: Tensor) -> Tensor:
        return over_rows(self.function, a, b)

    def grid(self, a: Tensor, b: Tensor) -> Tensor:
        k, rows = a.shape[0], b.shape[0]
        left = a.repeat_interleave(rows, 0)  # one batch: a lift inside a lift cannot be checked, nor looped
        out = self.paired(left, b.repeat(k, *(1,) * (b.ndim - 1)))
        return out.reshape(k, rows, *out.shape[1:])
