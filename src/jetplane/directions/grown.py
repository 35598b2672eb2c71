"""A family that grows, or is cut, by what its directions gain for their cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..ad.run.directions import Directions
from .earlier import adopted
from .plane import NOTHING_LEARNT, Family, Learning, Learnt, Plane, Size, Start, Taken


@dataclass(frozen=True)
class Grown(Learning):
    """``make(k)``, such as Gaussian(k), with k between ``smallest`` and ``most``: doubled where more directions pay.

    K is best where gain per cost is largest, and there the gain of the last directions for their cost is that of all of
    them. Every plane says both: the model on its first half is a part of the model on all. The advantage of the second
    half is, for the predicted decrease G and the cost C in forward passes of K and of K' = K / 2 directions,

        (G - G') / (C - C') / (G / C) - 1,

    which is added up, bounded by 1. At ``patience`` K is doubled, at -``patience`` it is halved.

    Example:
        >>> from jetplane.directions import Gaussian
        >>> grown = Grown(Gaussian, start=8, patience=2)
        >>> grown.resized(grown.resized((8, 0.0), 3.0), 1.5), grown.resized((8, -1.5), -0.7)
        ((16, 0.0), (4, 0.0))
    """

    make: Callable[[int], Family]
    smallest: int = 2
    most: int = 128
    start: int = 8
    patience: float = 10.0

    def __post_init__(self) -> None:
        if not callable(self.make):
            name = type(self.make).__name__
            raise TypeError(f"make is {name}; expected a function of k such as Gaussian.")
        for name, value in (("smallest", self.smallest), ("most", self.most), ("start", self.start)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}; expected a whole number of directions.")
        if not 2 <= self.smallest <= self.start <= self.most:
            raise ValueError(
                f"smallest, start and most are {self.smallest}, {self.start} and {self.most}; "
                "expected whole numbers from 2, none smaller than the one before it."
            )
        if not self.patience > 0:
            raise ValueError(f"patience is {self.patience!r}; expected a positive number.")

    def count(self, leaves: Sequence[Tensor]) -> int:
        return self.make(self.start).count(leaves)

    def fresh(self, leaves: Sequence[Tensor]) -> int:
        return self.make(self.most).count(leaves)

    def init(self) -> Start:
        return Start(size=(self.start, 0.0))

    def draw(self, plane: Plane, learnt: Learnt = NOTHING_LEARNT) -> Directions:
        k = self.start if learnt.size is None else learnt.size[0]
        return adopted(self.make(k)).draw(plane)

    def update(self, learnt: Learnt, taken: Taken) -> Learnt:
        assert learnt.size is not None
        half = self.make(learnt.size[0] // 2).count(taken.deltas)
        return learnt._replace(size=self.resized(learnt.size, taken.advantage(half)))

    def resized(self, size: Size, advantage: float) -> Size:
        """The next size, where the second half of the directions gained ``advantage`` more, for its cost, than all."""
        k, evidence = size
        evidence += min(1.0, max(-1.0, advantage))
        if abs(evidence) < self.patience:
            return k, evidence
        return (min(2 * k, self.most) if evidence > 0 else max(k // 2, self.smallest)), 0.0
