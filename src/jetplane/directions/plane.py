"""What a family of directions is given, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from ..ad.directions import Directions


class Plane(NamedTuple):
    """What a family may use to make the directions of one step."""

    seed: int | Tensor  # 64 bits; a tensor () where the step is traced
    step: int | Tensor  # from 0; likewise
    sample: int  # number of the plane within the step, from 0
    leaves: Sequence[Tensor]  # the parameters that move, in order
    gradient: Callable[[], list[Tensor]]  # one backward pass of the closure; only `Gradient` calls it


@runtime_checkable
class Family(Protocol):
    """A way to choose K directions: a small frozen callable part of an optimizer."""

    def count(self, leaves: Sequence[Tensor]) -> int:
        """K, the number of directions for these parameters."""
        ...

    def draw(self, plane: Plane) -> Directions:
        """The directions of one step; equal planes give equal rows."""
        ...


def entries(leaves: Sequence[Tensor]) -> int:
    """The number of entries of all parameters together: D."""
    return sum(leaf.numel() for leaf in leaves)
