"""What the engine asks of directions, and the ones that it makes itself.

A direction has the structure of the perturbed tensors; K of them have a leading axis K. Directions may also be lazy:
an object that makes the rows of one tensor when the program reaches it, so that they are never held all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from ..algebra.sparse import Block, Factors
from ..finite import finite


@runtime_checkable
class Directions(Protocol):
    """K directions in the space of a list of tensors."""

    @property
    def k(self) -> int:
        """How many directions there are."""
        ...

    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        """Rows start to stop - 1 for the tensor ``like`` at ``position``: (stop - start, *like.shape).

        Must give the same rows whenever it is asked again.
        """
        ...


class Structured(Directions, Protocol):
    """Directions that know where they are zero, or that they are outer products."""

    @property
    def structured(self) -> bool:
        """Whether they do: what is made of other directions knows it of them."""
        ...

    def blocks(self, position: int, like: Tensor) -> list[Block]:
        """The rows for one tensor that are not zero, by increasing numbers of the directions."""
        ...


def is_structured(directions: Directions) -> bool:
    """Whether ``blocks`` says more of the directions than their rows do."""
    return bool(getattr(directions, "structured", False))


def blocks_of(directions: Directions, position: int, like: Tensor) -> list[Block]:
    """The blocks of directions, of which those that know no more are one."""
    if is_structured(directions):
        # a protocol would look at all of its members each time, which a step would feel
        return cast(Structured, directions).blocks(position, like)
    return [Block(0, directions.rows(position, like, 0, directions.k))]


@dataclass(frozen=True)
class Given:
    """Directions held as tensors (K, *S), one for each perturbed tensor."""

    tensors: Sequence[Tensor]

    @property
    def k(self) -> int:
        return self.tensors[0].shape[0]

    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        return self.tensors[position][start:stop]


@dataclass(frozen=True)
class Basis:
    """The coordinate directions of all tensors together, made row by row.

    ``batch_ndim`` leading axes of every tensor are shared by each direction: for samples that do not interact.
    """

    shapes: Sequence[torch.Size]
    batch_ndim: int = 0

    @property
    def each(self) -> list[torch.Size]:
        """The shape of one sample of each tensor."""
        return [shape[self.batch_ndim :] for shape in self.shapes]

    @property
    def sizes(self) -> list[int]:
        """How many directions each tensor has."""
        return [shape.numel() for shape in self.each]

    @property
    def k(self) -> int:
        return sum(self.sizes)

    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        size = self.sizes[position]
        offset = sum(self.sizes[:position])
        index = torch.arange(start, stop, device=like.device) - offset
        hot = (index[:, None] == torch.arange(size, device=like.device)[None, :]).to(like.dtype)
        batch, rest = like.shape[: self.batch_ndim], like.shape[self.batch_ndim :]
        shaped = hot.reshape(stop - start, *(1,) * len(batch), *rest)
        return shaped.expand(stop - start, *like.shape) if batch else shaped


@dataclass(frozen=True)
class Joined:
    """The directions of one set, then those of another."""

    first: Directions
    then: Directions

    @property
    def k(self) -> int:
        return self.first.k + self.then.k

    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        cut = self.first.k
        parts = []
        if start < cut:
            parts.append(self.first.rows(position, like, start, min(stop, cut)))
        if stop > cut:
            parts.append(self.then.rows(position, like, max(start, cut) - cut, stop - cut))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def structured(self) -> bool:
        return is_structured(self.first) or is_structured(self.then)

    def blocks(self, position: int, like: Tensor) -> list[Block]:
        behind = [block._replace(start=block.start + self.first.k) for block in blocks_of(self.then, position, like)]
        return blocks_of(self.first, position, like) + behind


def check_shape(what: str, rows: Tensor, expected: tuple[int, ...]) -> None:
    """Raise unless the rows have this shape."""
    if tuple(rows.shape) != expected:
        raise ValueError(f"{what} have shape {tuple(rows.shape)}; expected {expected}.")


def check_kind(what: str, rows: Tensor, like: Tensor) -> None:
    """Raise unless the rows have the dtype of their tensor and are where it is."""
    if rows.dtype != like.dtype:
        raise ValueError(f"{what} have dtype {rows.dtype}; expected {like.dtype}.")
    if rows.device != like.device:
        raise ValueError(f"{what} are on {rows.device}; expected {like.device}.")


@dataclass(frozen=True)
class Checked:
    """Lazy directions of the user's, whose rows are checked as they are made."""

    directions: Directions

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"the directions have K = {self.k}; expected at least one direction.")

    @property
    def k(self) -> int:
        return self.directions.k

    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        rows = self.directions.rows(position, like, start, stop)
        what = f"the lazy directions' rows for tensor {position}"
        expected = (stop - start, *like.shape)
        if not isinstance(rows, Tensor):
            raise TypeError(f"{what} are {type(rows).__name__}; expected a tensor {expected}.")
        check_shape(what, rows, expected)
        check_kind(what, rows, like)
        if not finite([rows]):
            raise ValueError(f"{what} hold values that are not finite; expected finite numbers.")
        return rows


@dataclass(frozen=True)
class Leaf:
    """Some rows of some directions for one perturbed tensor: the source of its tangents."""

    tensor: Tensor
    position: int
    directions: Directions
    chosen: tuple[int, ...]
    curve: Tensor | None = None  # second rows of the leaf itself: a hyper-dual number's eps12

    def tangent(self) -> Tensor:
        """(rows chosen, *S)"""
        if not self.chosen:
            return self.tensor.new_zeros((0, *self.tensor.shape))
        parts = [self.directions.rows(self.position, self.tensor, start, stop) for start, stop in _ranges(self.chosen)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def second(self) -> Tensor | None:
        """(1, *S) or None"""
        return None if self.curve is None else self.curve.resolve_conj().resolve_neg()

    @property
    def structured(self) -> bool:
        """Whether some of the tangents are zero, or outer products."""
        return is_structured(self.directions)

    def blocks(self) -> list[Block]:
        """The chosen rows that are not zero, numbered within the chosen ones."""
        found = []
        number = 0
        parts = blocks_of(self.directions, self.position, self.tensor)
        for start, stop in _ranges(self.chosen):
            found += [_cut(block, start, stop, number) for block in parts if block.start < stop and start < block.stop]
            number += stop - start
        return found


def _cut(block: Block, start: int, stop: int, number: int) -> Block:
    """The rows from ``start`` to ``stop``, of which the first has another number."""
    low, high = max(start, block.start), min(stop, block.stop)
    place = number + low - start
    if (low, high) == (block.start, block.stop):
        return block._replace(start=place)
    part = slice(low - block.start, high - block.start)
    rows = block.rows
    return Block(place, Factors(rows.left[part], rows.right[part]) if isinstance(rows, Factors) else rows[part])


def _ranges(chosen: tuple[int, ...]) -> list[tuple[int, int]]:
    """Increasing row numbers as runs [start, stop)."""
    runs: list[tuple[int, int]] = []
    for row in chosen:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs
