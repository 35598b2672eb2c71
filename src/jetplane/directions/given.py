"""Directions that nobody draws: the coordinates, the gradient, and tensors of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..ad.run.directions import Basis, Directions, Given, check_kind, check_shape
from .plane import NOTHING_LEARNT, Learning, Learnt, Plane, entries


@dataclass(frozen=True)
class Coordinate(Learning):
    """All D coordinate directions: V is the identity, so that the plane is the whole space.

    Example:
        >>> Coordinate().count([torch.zeros(2, 3), torch.zeros(4)])
        10
    """

    def count(self, leaves: Sequence[Tensor]) -> int:
        return entries(leaves)

    def draw(self, plane: Plane, learnt: Learnt = NOTHING_LEARNT) -> Directions:
        return Basis([leaf.shape for leaf in plane.leaves])


@dataclass(frozen=True)
class Gradient(Learning):
    """The gradient itself, K = 1, from one backward pass at the time of drawing.

    Example:
        >>> x = torch.tensor([1.0, 2.0])
        >>> drawn = Gradient().draw(Plane(0, 0, 0, [x], lambda: [2 * x]))
        >>> drawn.rows(0, x, 0, 1)
        tensor([[2., 4.]])
    """

    def count(self, leaves: Sequence[Tensor]) -> int:
        return 1

    def draw(self, plane: Plane, learnt: Learnt = NOTHING_LEARNT) -> Directions:
        return Given([part.detach().unsqueeze(0) for part in plane.gradient()])


@dataclass(frozen=True, eq=False)
class Fixed(Learning):
    """The same directions at every step: one tensor (K, *S) for each parameter.

    Example:
        >>> x = torch.zeros(3)
        >>> Fixed([torch.eye(3)[:2]]).count([x])
        2
    """

    rows: Sequence[Tensor]  # one (K, *S) for each parameter

    def __post_init__(self) -> None:
        if isinstance(self.rows, Tensor) or not isinstance(self.rows, Sequence):
            name = type(self.rows).__name__
            raise TypeError(f"the fixed directions are {name}; expected a list of tensors (K, *S), one per parameter.")
        if not self.rows:
            raise ValueError("the fixed directions are an empty list; expected one tensor (K, *S) per parameter.")
        for position, rows in enumerate(self.rows):
            if not isinstance(rows, Tensor):
                name = type(rows).__name__
                raise TypeError(f"the fixed directions for parameter {position} are {name}; expected a tensor.")
        for position, rows in enumerate(self.rows):
            if rows.ndim < 1 or rows.shape[0] < 1:
                shape = tuple(rows.shape)
                raise ValueError(
                    f"the fixed directions for parameter {position} have shape {shape}; expected (K, *S) with K >= 1."
                )
            if rows.shape[0] != self.rows[0].shape[0]:
                raise ValueError(
                    f"the fixed directions for parameter {position} have K = {rows.shape[0]}; "
                    f"expected {self.rows[0].shape[0]} as for parameter 0."
                )

    def count(self, leaves: Sequence[Tensor]) -> int:
        return self.rows[0].shape[0]

    def draw(self, plane: Plane, learnt: Learnt = NOTHING_LEARNT) -> Directions:
        if len(self.rows) != len(plane.leaves):
            raise ValueError(
                f"there are fixed directions for {len(self.rows)} parameters; expected {len(plane.leaves)}."
            )
        for position, (rows, leaf) in enumerate(zip(self.rows, plane.leaves, strict=True)):
            what = f"the fixed directions for parameter {position}"
            check_shape(what, rows, (rows.shape[0], *leaf.shape))
            check_kind(what, rows, leaf)
        return Given(self.rows)
