"""Heads: a softmax, a sigmoid or the logarithm of one, as the last operation of a model.

Where second order begins at the loss, the model before it carries tangents alone. A loss that is given probabilities
needs the head's second rows nevertheless. They follow from its value y and its tangents y_i, because what the head is
taken of is linear in the parameters there, so that they can be made after the fact.

``HEADS`` says of an operation which head its result is, given the one that its first argument is, if any.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..algebra.jet import PairSet
from ..storage_geometry import Geometry, geometry

__all__ = ["HEADS", "Head"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Head(ABC):
    """A tensor that is such a function of something linear in the parameters."""

    axis: int  # of the classes
    anchor: Geometry  # of the tensor that it says this of

    elementwise: ClassVar[bool] = False  # no classes: each entry alone
    logarithm: ClassVar[bool] = False

    @abstractmethod
    def second(self, pairs: PairSet, y: Tensor, tangent: Tensor) -> Tensor:
        """The second rows (rows, *S) of ``y`` (S), from its tangents (K, *S)."""

    def seen_by(self, tensor: Tensor) -> int | None:
        """The axis of the classes in ``tensor``, a view; None where they are not one of its axes."""
        size, stride, _ = self.anchor
        if geometry(tensor) == self.anchor or not size:
            return self.axis
        wanted = size[self.axis], stride[self.axis]
        found = [axis for axis, one in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if one == wanted]
        return found[0] if len(found) == 1 else None


class LogSoftmax(Head):
    """y_ij = -<p, y_i y_j>,  p = exp(y)"""

    logarithm = True

    def second(self, pairs: PairSet, y: Tensor, tangent: Tensor) -> Tensor:
        return (-pairs.inner(tangent * y.exp(), tangent, self.axis - y.ndim)).expand(-1, *y.shape)


class Softmax(Head):
    """y_ij = y_i y_j / y - y <1, y_i y_j / y>"""

    def second(self, pairs: PairSet, y: Tensor, tangent: Tensor) -> Tensor:
        squares = pairs.outer(_over(tangent, y), tangent)
        return squares - y * squares.sum(self.axis - y.ndim, keepdim=True)


class LogSigmoid(Head):
    """y_ij = -y_i y_j exp(y) / (1 - exp(y))"""

    elementwise = logarithm = True

    def second(self, pairs: PairSet, y: Tensor, tangent: Tensor) -> Tensor:
        return pairs.outer(_over(tangent, torch.expm1(y)) * y.exp(), tangent)


class Sigmoid(Head):
    """y_ij = y_i y_j (1 - 2 y) / (y (1 - y))"""

    elementwise = True

    def second(self, pairs: PairSet, y: Tensor, tangent: Tensor) -> Tensor:
        return pairs.outer(_over(tangent, y * (1 - y)) * (1 - 2 * y), tangent)


def _over(rows: Tensor, value: Tensor) -> Tensor:
    """rows / value, zero where the value is: the rows are there, too."""
    return torch.where(value == 0, 0.0, rows / torch.where(value == 0, 1.0, value))


# -- operations ---------------------------------------------------------------------------------------------------

Kind = type[Head]
Follow = Callable[[Sequence[Any], Tensor, Head | None], Head | None]  # (arguments, result, head of the first argument)
Where = Callable[..., int | None]  # where an axis is after a move: (axis, *arguments)


def _over_classes(kind: Kind) -> Follow:
    return lambda args, y, before: kind(args[1] % max(y.ndim, 1), geometry(y))


def _of_each_entry(kind: Kind) -> Follow:
    return lambda args, y, before: kind(0, geometry(y))


def _moved(after: Where) -> Follow:
    """Elements of the first argument; ``after`` gives None where the classes are not together any more."""
    return lambda args, y, before: None if before is None else _carried(type(before), before, args, y, after)


def _logarithm(args: Sequence[Any], y: Tensor, before: Head | None) -> Head | None:
    kind = _LOGARITHMS.get(type(before))
    return None if kind is None or before is None else _carried(kind, before, args, y, _the_same)


def _carried(kind: Kind, before: Head, args: Sequence[Any], y: Tensor, after: Where) -> Head | None:
    if before.elementwise:
        return kind(0, geometry(y))
    axis = before.seen_by(args[0])
    axis = None if axis is None else after(axis, *args)
    return None if axis is None else kind(axis % max(y.ndim, 1), geometry(y))


def _the_same(axis: int, *args: Any) -> int | None:
    return axis


def _of_selected(axis: int, x: Tensor, dim: int, index: Tensor) -> int | None:
    return axis if dim % x.ndim != axis else None


def _of_indexed(axis: int, x: Tensor, indices: Sequence[Any]) -> int | None:
    return -1 if axis == x.ndim - 1 and len(indices) <= axis else None


_LOGARITHMS: dict[Any, Kind] = {Softmax: LogSoftmax, Sigmoid: LogSigmoid}

HEADS: dict[Any, Follow] = {
    aten._log_softmax: _over_classes(LogSoftmax),
    aten._softmax: _over_classes(Softmax),
    aten.sigmoid: _of_each_entry(Sigmoid),
    aten.log_sigmoid_forward: _of_each_entry(LogSigmoid),
    aten.log: _logarithm,
    aten.clone: _moved(_the_same),
    aten._to_copy: _moved(_the_same),
    aten.index: _moved(_of_indexed),
    aten.index_select: _moved(_of_selected),
}
