"""Directions stretched by the relative learning rates of the groups, and the update that they make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.algebra.sparse import Block, Factors
from ..ad.run.directions import Directions, blocks_of, is_structured
from ..ad.run.parts import is_shared_out, own, part_of, whole_like
from ..ad.run.replay import Replay
from ..directions.weighed import in_order


@dataclass(frozen=True)
class Scaled:
    """The directions s_g v_k: each tensor's rows are multiplied by the scale of its group."""

    directions: Directions
    scales: Sequence[float | Tensor]  # one for each tensor; tensors () in a traced program
    labels: Sequence[str]

    @property
    def k(self) -> int:
        return self.directions.k

    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        rows = self.directions.rows(position, like, start, stop)
        expected = (stop - start, *like.shape)
        if tuple(rows.shape) != expected or rows.dtype != like.dtype or rows.device != like.device:
            raise ValueError(
                f"directions for {self.labels[position]} are {tuple(rows.shape)} {rows.dtype} on {rows.device}; "
                f"expected {expected} {like.dtype} on {like.device}."
            )
        return self._stretched(rows, position)

    @property
    def structured(self) -> bool:
        return is_structured(self.directions)

    def blocks(self, position: int, like: Tensor) -> list[Block]:
        return [
            Block(
                block.start,
                Factors(self._stretched(block.rows.left, position), block.rows.right)
                if isinstance(block.rows, Factors)
                else self._stretched(block.rows, position),
            )
            for block in blocks_of(self.directions, position, like)
        ]

    def _stretched(self, rows: Tensor, position: int) -> Tensor:
        scale = self.scales[position]
        return rows if isinstance(scale, float) and scale == 1.0 else rows * scale

    def combine(self, coefficients: Tensor, position: int, like: Tensor, block: int) -> Tensor:
        """sum_k c_k v_k for one tensor, ``block`` rows at a time: (*S)."""
        if self.structured:
            return self._combined(coefficients, position, like)
        total: Tensor | None = None
        for start in range(0, self.k, block):
            stop = min(start + block, self.k)
            rows = self.rows(position, like, start, stop)
            some = coefficients if stop - start == self.k else coefficients[start:stop]
            part = combined(some.to(like), rows)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def _combined(self, coefficients: Tensor, position: int, like: Tensor) -> Tensor:
        """The same for directions that know where they are zero."""
        parts = []
        for one in self.blocks(position, like):
            some = coefficients[one.start : one.stop].to(like)
            parts.append(one.rows.combined(some) if isinstance(one.rows, Factors) else combined(some, one.rows))
        return sum(parts[1:], parts[0]) if parts else torch.zeros_like(like)


def combined(coefficients: Tensor, rows: Tensor) -> Tensor:
    """sum_k c_k v_k for rows (K, *S): (*S)."""
    traced = _torch.is_fake(type(rows))
    flat = rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))
    if not (rows.is_cpu or traced):
        return in_order(coefficients, flat).reshape(rows.shape[1:])
    # a compiler fuses a sum, and calls a library for a product
    part = (coefficients.unsqueeze(1) * flat).sum(0) if traced else coefficients @ flat
    return part.reshape(rows.shape[1:])


def update(
    planes: Sequence[tuple[Scaled, Tensor]],
    leaves: Sequence[Tensor],
    used: Sequence[bool],
    block: int | None,
    lengths: list[Tensor] | None = None,
) -> list[Tensor]:
    """The sum over planes of sum_k c_k v_k, one tensor like each of the leaves, made tensor by tensor.

    Zero for leaves that the closures do not use: the model says nothing of them. Of a leaf that processes share out it
    is this process's part; ``lengths`` is given that of each whole one.
    """
    deltas = []
    for position, (leaf, read) in enumerate(zip(leaves, used, strict=True)):
        like = whole_like(leaf).detach()
        if not read:
            deltas.append(torch.zeros_like(own(leaf)))
            continue
        parts = [scaled.combine(c, position, like, block or scaled.k) for scaled, c in planes]
        delta = sum(parts[1:], parts[0])
        if lengths is not None:
            lengths.append(torch.linalg.vector_norm(delta, dtype=torch.float64))
        deltas.append(part_of(delta, leaf).clone() if is_shared_out(leaf) else delta)
    return deltas


def clipped(deltas: Sequence[Tensor], limit: float) -> float:
    """The factor that brings the length of the whole update down to ``limit``.

    Example:
        >>> clipped([torch.tensor([3.0]), torch.tensor([4.0])], 1.0)
        0.2
    """
    # in float64: the squares of float32 numbers may overflow
    return shortened([torch.linalg.vector_norm(delta, dtype=torch.float64) for delta in deltas], limit)


def shortened(lengths: Sequence[Tensor], limit: float) -> float:
    """The same, from the lengths of the parts of the update."""
    length = float(torch.linalg.vector_norm(torch.stack(list(lengths))))
    return limit / length if length > limit else 1.0


class Held:
    """Lazy directions that are made once for each tensor: a step uses them twice, in the pass and in the update.

    Those of ``leaves`` are made at once: inside of a pass the engine would look at each operation that makes them.
    """

    def __init__(self, directions: Directions, leaves: Sequence[Tensor] = ()) -> None:
        self._directions = directions
        self._made: dict[int, Tensor] = {}
        self._blocks: dict[int, list[Block]] = {}
        for position, leaf in enumerate(leaves):
            if self.structured:
                self.blocks(position, leaf)
            else:
                self.rows(position, leaf, 0, directions.k)

    @property
    def k(self) -> int:
        return self._directions.k

    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        if position not in self._made:
            self._made[position] = self._directions.rows(position, like, 0, self.k)
        made = self._made[position]
        return made if stop - start == made.shape[0] else made[start:stop]

    @property
    def structured(self) -> bool:
        return is_structured(self._directions)

    def blocks(self, position: int, like: Tensor) -> list[Block]:
        if position not in self._blocks:
            self._blocks[position] = blocks_of(self._directions, position, like)
        return self._blocks[position]


@dataclass(frozen=True)
class Unwatched:
    """Lazy directions made while the replay looks away: they take hundreds of small operations, and write nothing."""

    directions: Directions
    replay: Replay

    @property
    def k(self) -> int:
        return self.directions.k

    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        with self.replay.unwatched():
            return self.directions.rows(position, like, start, stop)

    @property
    def structured(self) -> bool:
        return is_structured(self.directions)

    def blocks(self, position: int, like: Tensor) -> list[Block]:
        with self.replay.unwatched():
            return blocks_of(self.directions, position, like)
