"""Directions that remember: the last step, averages of the steps, and the best directions of the last plane.

They have the length of Gaussian directions, sqrt(D), and are zero until there is something to remember. Only their
lines count, not how long the steps were, and a solver has columns of one scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..ad.run.directions import Directions
from .counter import working_dtype
from .plane import NOTHING_LEARNT, Learning, Learnt, Plane, Start, Taken, entries

_BLOCK = 8  # directions that are made at a time


@dataclass(frozen=True)
class PreviousStep(Learning):
    """The last step that was taken, K = 1: with it a plane can go on where the last one went.

    Example:
        >>> x = torch.zeros(4)
        >>> learnt = Learnt({"previous": [torch.tensor([0.0, 3.0, 0.0, 4.0])]})
        >>> drawn = PreviousStep().draw(Plane(0, 1, 0, [x], list), learnt)
        >>> drawn.rows(0, x, 0, 1)  # of length 2
        tensor([[0.0000, 1.2000, 0.0000, 1.6000]])
    """

    def init(self) -> Start:
        return Start({"previous": ()})

    def fresh(self, leaves: Sequence[Tensor]) -> int:
        return 0

    def count(self, leaves: Sequence[Tensor]) -> int:
        return 1

    def draw(self, plane: Plane, learnt: Learnt = NOTHING_LEARNT) -> Directions:
        return _Remembered([tensor.unsqueeze(0) for tensor in _recalled(plane, learnt, "previous")])

    def update(self, learnt: Learnt, taken: Taken) -> Learnt:
        for tensor, delta in zip(learnt.memory["previous"], taken.deltas, strict=True):
            tensor.copy_(delta)
        return learnt


@dataclass(frozen=True)
class Momentum(Learning):
    """Exponential averages of the steps, one direction for each horizon: m <- beta m + (1 - beta) step.

    Example:
        >>> Momentum([0.9, 0.99]).count([torch.zeros(3)])
        2
    """

    betas: float | Sequence[float] = 0.9

    def __post_init__(self) -> None:
        betas = (self.betas,) if isinstance(self.betas, int | float) else tuple(self.betas)
        if not betas:
            raise ValueError("there are no betas; expected at least one.")
        for beta in betas:
            if not (isinstance(beta, int | float) and 0 <= beta < 1):
                raise ValueError(f"beta is {beta!r}; expected a number from 0, below 1.")
        object.__setattr__(self, "betas", betas)  # one form, which can be hashed

    @property
    def _betas(self) -> tuple[float, ...]:
        assert isinstance(self.betas, tuple)
        return self.betas

    def init(self) -> Start:
        return Start({"momentum": (len(self._betas),)})

    def fresh(self, leaves: Sequence[Tensor]) -> int:
        return 0

    def count(self, leaves: Sequence[Tensor]) -> int:
        return len(self._betas)

    def draw(self, plane: Plane, learnt: Learnt = NOTHING_LEARNT) -> Directions:
        return _Remembered(_recalled(plane, learnt, "momentum"))

    def update(self, learnt: Learnt, taken: Taken) -> Learnt:
        for averages, delta in zip(learnt.memory["momentum"], taken.deltas, strict=True):
            for average, beta in zip(averages, self._betas, strict=True):
                average.lerp_(delta, 1.0 - beta)
        return learnt


@dataclass(frozen=True)
class Best(Learning):
    """The ``kept`` directions that gained most in the last plane, whichever family they came from.

    A direction's gain is its share -c_k g_k of the decrease. A good one stays for as long as it is among the best.

    Example:
        >>> Best(4).count([torch.zeros(9)])
        4
    """

    kept: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.kept, int) or isinstance(self.kept, bool) or self.kept < 1:
            raise ValueError(f"kept is {self.kept!r}; expected a whole number of directions from 1.")

    def init(self) -> Start:
        return Start({"best": (self.kept,)})

    def fresh(self, leaves: Sequence[Tensor]) -> int:
        return 0

    def count(self, leaves: Sequence[Tensor]) -> int:
        return self.kept

    def draw(self, plane: Plane, learnt: Learnt = NOTHING_LEARNT) -> Directions:
        return _Remembered(_recalled(plane, learnt, "best"))

    def update(self, learnt: Learnt, taken: Taken) -> Learnt:
        k = len(taken.gains)
        found = min(self.kept, k)
        chosen = taken.gains.topk(found).indices
        # a sum with weights 0 and 1, for a step that runs on a device without waiting does not know the numbers
        weights = (torch.arange(k, device=chosen.device) == chosen.unsqueeze(1)).to(torch.float32)  # (found, K)
        for position, best in enumerate(learnt.memory["best"]):
            like = taken.deltas[position]
            total = torch.zeros_like(best)
            for start in range(0, k, _BLOCK):
                stop = min(start + _BLOCK, k)
                rows = taken.directions.rows(position, like, start, stop)
                total[:found] += torch.tensordot(weights[:, start:stop].to(like.dtype), rows, dims=1)
            best.copy_(total)
        return learnt


def _recalled(plane: Plane, learnt: Learnt, name: str) -> list[Tensor]:
    memory = learnt.memory or plane.memory
    if name not in memory:
        raise ValueError(f"the plane has no memory {name!r}; expected what the optimizer keeps for its directions.")
    return memory[name]


class _Remembered:
    """Directions (K, *S), one tensor for each parameter, brought to the length sqrt(D); zero stays zero."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    @property
    def k(self) -> int:
        return self._tensors[0].shape[0]

    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        rows = self._tensors[position][start:stop]
        dtype = working_dtype(rows.dtype)  # of short dtypes the factor would not be one
        factors = self._factors[start:stop].to(dtype).reshape(-1, *(1,) * like.ndim)
        return (rows.to(dtype) * factors).to(rows.dtype)

    @cached_property
    def _factors(self) -> Tensor:
        """(K,) in float64."""
        flat = [part.reshape(self.k, part.numel() // self.k) for part in self._tensors]
        # in float64: the squares of float32 numbers may overflow, or vanish
        parts = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in flat]
        length = torch.linalg.vector_norm(torch.stack(parts), dim=0)
        wanted = math.sqrt(entries(self._tensors) / self.k)
        # what is shorter than any number that it could be divided by is nothing to remember
        there = length > wanted / torch.finfo(torch.float32).max
        return torch.where(there, wanted / torch.where(there, length, 1.0), 0.0)
