"""Functions of parameters alone, as regularisers are: how one was made, so that it can be made again with second rows.

Where second order begins at the loss, they carry tangents alone until the loss uses them. Entries of a parameter are
one, while a layer behind them, as behind an embedding, is the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...errors import MissingBoundary
from .. import _torch
from ..algebra.jet import Operand, PairSet
from ..algebra.registry import is_elementwise, plan

__all__ = ["Recipe", "in_order", "recipe"]


@dataclass(frozen=True, eq=False)
class Recipe:
    """The operation that made a function of parameters alone."""

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    parents: list[Recipe]
    versions: list[tuple[Tensor, int]]
    gathered: bool = False  # made of entries that whole numbers choose, which may be data

    def run(self, pairs: PairSet, lift: Callable[[Any], Any]) -> Operand:
        """The jet, from those of its arguments."""
        for tensor, version in self.versions:
            if tensor._version != version:
                raise MissingBoundary(
                    "a function of parameters that the loss uses was written in place since; "
                    "expected it behind the model's output, or jetplane.mark_output on the parameters."
                )
        apply = plan(self.func).apply
        assert apply is not None
        out = apply(pairs, self.func, *map(lift, self.args), **{name: lift(v) for name, v in self.kwargs.items()})
        assert isinstance(out, Operand)
        return out


def recipe(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tracked: Sequence[Tensor],
    parents: list[Recipe],
    value: Tensor,
) -> Recipe | None:
    """How ``value`` is made of ``tracked``, leaves and what ``parents`` make; None where the model makes it."""
    if plan(func).traits.meets:
        return None  # a collective is not run once more, when others may do something else
    tensors = [leaf for leaf in _torch.pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(tensor.is_inference() for tensor in tensors):  # they do not count what is written to them
        return None
    gathered = any(parent.gathered for parent in parents)
    if _is_layer(func, tensors, tracked, value, gathered):
        return None
    versions = [(tensor, tensor._version) for tensor in tensors]
    return Recipe(func, args, kwargs, parents, versions, gathered or _is_gather(func, tensors))


def _is_layer(func: Any, tensors: Sequence[Tensor], tracked: Sequence[Tensor], value: Tensor, gathered: bool) -> bool:
    """Whether an operation on functions of parameters is the model's: with data, or behind an embedding."""
    with_others = len(tensors) > len(tracked)
    if with_others and value.numel() > max(tensor.numel() for tensor in tracked):
        return True
    if is_elementwise(func) or plan(func).traits.chooses:  # a product with data is larger, or no such operation
        return False
    if gathered and len(tracked) > 1:
        return True
    return with_others and not _is_gather(func, tensors)


def _is_gather(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether an operation takes entries of its one floating tensor, at places that whole numbers or masks tell."""
    return plan(func).traits.gathers and sum(tensor.is_floating_point() for tensor in tensors) == 1


def in_order(wanted: Recipe) -> list[Recipe]:
    """What ``wanted`` is made of, parents first, and itself."""
    # not by recursion: a sum over parameters is a long chain
    order: list[Recipe] = []
    seen: set[Recipe] = set()
    stack = [(wanted, False)]
    while stack:
        one, entered = stack.pop()
        if entered:
            order.append(one)
        elif one not in seen:
            seen.add(one)
            stack.append((one, True))
            stack += [(parent, False) for parent in reversed(one.parents)]
    return order
