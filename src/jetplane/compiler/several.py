"""Several calls of one captured program, with an entry of some batches each, on both sides of Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ad import _torch

__all__ = ["Several", "alone", "entries", "in_batch", "stacked"]


def in_batch(change: Callable[[Tensor], Tensor], batch: Sequence[Any]) -> tuple[Any, ...]:
    """``change`` of the tensors of a batch, also of those in dicts and lists; what requires grad there is a parameter.

    Example:
        >>> in_batch(lambda tensor: tensor[0], (torch.arange(3), {"x": torch.ones(2)}, "a word"))
        (tensor(0), {'x': tensor(1.)}, 'a word')
    """

    def inside(tensor: Tensor) -> Tensor:
        return tensor if tensor.requires_grad else change(tensor)

    return tuple(
        change(one) if isinstance(one, Tensor) else _torch.pytree.tree_map_only(Tensor, inside, one) for one in batch
    )


@dataclass
class Several:
    """Dynamo sees the first call alone: what it hands over is put beside what all of them are given, and give.

    Example:
        >>> import torch
        >>> some = Several.of((torch.arange(6.0).reshape(3, 2), "a word"), 3)
        >>> some.first
        (tensor([0., 1.]), 'a word')
    """

    first: tuple[Any, ...]  # the arguments of the first call, or of a part of it
    batches: tuple[Any, ...]  # those of all calls: their tensors have one more axis
    count: int
    stacked: dict[Tensor, Tensor] = field(default_factory=dict)  # by an output of the first call: those of all

    @staticmethod
    def of(
        batches: tuple[Any, ...], count: int, part: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None
    ) -> Several:
        """With each entry of the first axis of the tensors among the batches; Dynamo sees a ``part`` of the first."""
        first = in_batch(lambda batch: batch[0], batches)
        return Several(first if part is None else part(first), batches, count)

    def fed(self, inputs: Sequence[Tensor]) -> dict[int, Tensor]:
        """By place among the inputs, the batches of all calls."""
        leaves = zip(*map(_torch.pytree.tree_leaves, (self.first, self.batches)), strict=True)
        given = {one: batch for one, batch in leaves if isinstance(one, Tensor) and one is not batch}
        return {place: given[tensor] for place, tensor in enumerate(inputs) if tensor in given}

    def keep(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Note the outputs (n, ...) of all calls, and return those of the first."""
        once = [output[0] for output in outputs]
        self.stacked = dict(zip(once, outputs, strict=True))
        return once

    def every(self, value: Any) -> Any:
        """What all calls gave, for what the first one gave."""
        return self.stacked.get(value, value) if isinstance(value, Tensor) else value


def entries(closure: Any, batches: Sequence[Any]) -> int:
    """How many calls of a function the batches are for."""
    if not callable(closure):
        raise TypeError(f"steps got {type(closure).__name__}; expected a function of a batch that returns the loss.")
    counts = {batch.shape[0] if isinstance(batch, Tensor) and batch.ndim else None for batch in batches}
    if len(counts) != 1 or None in counts:
        shapes = [tuple(b.shape) if isinstance(b, Tensor) else type(b).__name__ for b in batches]
        raise ValueError(f"the batches are {shapes}; expected tensors with a first axis of one length, the steps.")
    (count,) = counts
    if not count:
        raise ValueError("the batches have no entries; expected at least one step.")
    return int(count)


def alone(batch: Sequence[Any]) -> tuple[Any, ...]:
    """A batch as the only one of several calls."""
    return in_batch(lambda part: part.unsqueeze(0), batch)


def stacked(*values: Any) -> Any:
    """What several calls gave at one place: a tensor, or a list."""
    return torch.stack(values) if isinstance(values[0], Tensor) else list(values)
