"""Random directions that cost next to nothing: each moves one layer, by an outer product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from ..ad.algebra.sparse import Block, Factors
from ..ad.run.directions import Directions
from .mixed import layers_of
from .plane import Plane
from .random import NormalRows, RandomFamily


@dataclass(frozen=True)
class RankOne(RandomFamily):
    """K directions that move one layer each: its weights by a b^T with Gaussian a and b, its vectors likewise.

    E[v v^T] is that of Gaussian directions in the layer, so a direction gains as much on average, but a product with it
    is one with b and one with a, and layers before it see none of it. That pays where second order begins at the loss
    (``curvature="ggn"``): the fewer layers follow, the less a direction costs. The layers are those of
    :class:`PerLayer`; of the K directions each has a share that grows with the root of its entries, and at least one.

    Example:
        >>> layers = [torch.zeros(30, 20), torch.zeros(30), torch.zeros(2, 30), torch.zeros(2)]
        >>> drawn = RankOne(8).draw(Plane(0, 0, 0, layers, list))
        >>> [torch.linalg.matrix_rank(row).item() for row in drawn.rows(0, layers[0], 0, 8)]
        [1, 1, 1, 1, 1, 1, 0, 0]
    """

    def shares(self, leaves: Sequence[Tensor]) -> list[int]:
        """How many of the directions each layer has."""
        layers = layers_of(leaves)
        count = max(layers) + 1
        if self.k < count:
            raise ValueError(f"k is {self.k} and there are {count} layers; expected at least one direction for each.")
        entries = [0] * count
        for layer, leaf in zip(layers, leaves, strict=True):
            entries[layer] += leaf.numel()
        return _shares(self.k, entries)

    def _rows(self, plane: Plane) -> Directions:
        ends = [0, *accumulate(self.shares(plane.leaves))]
        runs = [(ends[layer], ends[layer + 1]) for layer in layers_of(plane.leaves)]
        return _RankOneRows(self.k, plane, runs)


class _RankOneRows(NormalRows):
    """The directions of the first layer, then those of the second, and so on."""

    structured = True

    def __init__(self, k: int, plane: Plane, runs: Sequence[tuple[int, int]]) -> None:
        super().__init__(k, plane)
        self._runs = runs  # of each parameter: those of its layer

    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        rows = like.new_zeros((stop - start, *like.shape))
        (block,) = self.blocks(position, like)
        low, high = max(start, block.start), min(stop, block.stop)
        if low < high:
            rows[low - start : high - start] = block.dense()[low - block.start : high - block.start]
        return rows

    def blocks(self, position: int, like: Tensor) -> list[Block]:
        start, stop = self._runs[position]
        count, outputs, inputs = stop - start, like.shape[:1].numel(), like.shape[1:].numel()
        if like.ndim < 2 or outputs + inputs >= outputs * inputs:
            return [Block(start, super().rows(position, like, 0, count))]
        both = self._working(position, like.new_empty(outputs + inputs), 0, count).to(like.dtype)
        left, right = both.split([outputs, inputs], dim=1)
        return [Block(start, Factors(left, right.reshape(count, *like.shape[1:])))]


def _shares(k: int, entries: Sequence[int]) -> list[int]:
    """How many of K directions each layer gets: one, and of the others a part like the root of its entries.

    Example:
        >>> _shares(100, [520, 25050, 400500, 5010])
        [3, 19, 69, 9]
    """
    roots = [math.sqrt(count) for count in entries]
    spare = k - len(entries)
    ends = [round(spare * part / sum(roots)) for part in accumulate(roots)]
    return [1 + end - start for start, end in zip([0, *ends], ends, strict=False)]
