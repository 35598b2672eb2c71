"""Random directions: lazy, counter-based, independent of torch's generators."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..ad.run.directions import Directions
from . import scalar, traced
from .counter import Stream, normal, working_dtype
from .counter import rademacher as signs
from .plane import NOTHING_LEARNT, Learning, Learnt, Plane, entries


def _check_count(k: object) -> None:
    if not isinstance(k, int) or isinstance(k, bool):
        raise TypeError(f"k is {type(k).__name__}; expected a whole number of directions.")
    if k < 1:
        raise ValueError(f"k is {k}; expected at least one direction.")


def _check_numbers(plane: Plane) -> None:
    for name, value, limit in (("step", plane.step, 32), ("sample", plane.sample, 16)):
        if isinstance(value, int) and not 0 <= value < 1 << limit:
            raise ValueError(f"{name} is {value}; expected 0 to 2**{limit} - 1.")
    if len(plane.leaves) > 1 << 16:
        raise ValueError(f"there are {len(plane.leaves)} parameters; expected at most 2**16.")


@dataclass(frozen=True)
class RandomFamily(Learning):
    """What the random families share: K directions, drawn within the range of the counter."""

    k: int

    def __post_init__(self) -> None:
        _check_count(self.k)

    def count(self, leaves: Sequence[Tensor]) -> int:
        """K."""
        return self.k

    def draw(self, plane: Plane, learnt: Learnt = NOTHING_LEARNT) -> Directions:
        """The directions of one plane, made when they are asked for."""
        _check_numbers(plane)
        return self._rows(plane)

    @abstractmethod
    def _rows(self, plane: Plane) -> Directions: ...


@dataclass(frozen=True)
class Gaussian(RandomFamily):
    """Independent standard normal entries: E[v v^T] = I, which makes E[(v . g) v] = g.

    Example:
        >>> x = torch.zeros(2, 3)
        >>> drawn = Gaussian(4).draw(Plane(0, 0, 0, [x], list))
        >>> rows = drawn.rows(0, x, 0, 4)
        >>> rows.shape
        torch.Size([4, 2, 3])
        >>> assert torch.equal(rows[1:3], drawn.rows(0, x, 1, 3))
    """

    def _rows(self, plane: Plane) -> Directions:
        return NormalRows(self.k, plane)


@dataclass(frozen=True)
class Rademacher(RandomFamily):
    """Entries +1 or -1 with equal chances: E[v v^T] = I, and every direction has the length sqrt(D).

    Example:
        >>> x = torch.zeros(100)
        >>> rows = Rademacher(2).draw(Plane(0, 0, 0, [x], list)).rows(0, x, 0, 2)
        >>> assert torch.equal(rows.abs(), torch.ones(2, 100))
    """

    def _rows(self, plane: Plane) -> Directions:
        return _Signs(self.k, plane)


@dataclass(frozen=True)
class Sphere(RandomFamily):
    """Uniform on the unit sphere: v = z / |z| with Gaussian z, the length taken over all parameters together.

    Example:
        >>> x = torch.zeros(5)
        >>> rows = Sphere(2).draw(Plane(0, 0, 0, [x], list)).rows(0, x, 0, 2)
        >>> torch.testing.assert_close(rows.norm(dim=1), torch.ones(2))
    """

    def _rows(self, plane: Plane) -> Directions:
        return _Unit(self.k, plane)


@dataclass(frozen=True)
class Orthonormal(RandomFamily):
    """K orthonormal directions, uniform among all such frames: V V^T = I over all parameters together.

    V^T is the Q of the QR factorisation of Gaussian rows, its signs chosen so that R has a positive diagonal. The rows
    are held in memory for as long as the directions are in use.

    Example:
        >>> x = torch.zeros(5)
        >>> rows = Orthonormal(2).draw(Plane(0, 0, 0, [x], list)).rows(0, x, 0, 2)
        >>> torch.testing.assert_close(rows @ rows.T, torch.eye(2))
    """

    def _rows(self, plane: Plane) -> Directions:
        size = entries(plane.leaves)
        if self.k > size:
            raise ValueError(f"k is {self.k}; expected at most {size} orthonormal directions in {size} dimensions.")
        return _Frame(self.k, plane)


# -- the lazy rows ------------------------------------------------------------------------------------------------


class _Lazy:
    """K directions of one plane, made when they are asked for."""

    def __init__(self, k: int, plane: Plane) -> None:
        self._k = k
        self._plane = plane

    @property
    def k(self) -> int:
        return self._k

    def _stream(self, position: int) -> Stream:
        return Stream(self._plane.seed, self._plane.step, self._plane.sample, position)


class NormalRows(_Lazy):
    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        return self._working(position, like, start, stop).to(like.dtype).reshape(stop - start, *like.shape)

    def _working(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        """(rows, entries of the leaf), before it is rounded to a short dtype."""
        dtype, stream = working_dtype(like.dtype), self._stream(position)
        if isinstance(stream.step, Tensor) or traced.fast(like.device):
            return traced.normal(stream, start, stop, like.numel(), dtype=dtype, like=like)
        if scalar.pays(stop - start, like.numel(), dtype, like.device):
            return scalar.normal(stream, start, stop, like.numel(), dtype)
        return normal(stream, start, stop, like.numel(), dtype=dtype, device=like.device)


class _Signs(_Lazy):
    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        numbers = signs(self._stream(position), start, stop, like.numel(), dtype=like.dtype, device=like.device)
        return numbers.reshape(stop - start, *like.shape)


class _Unit(NormalRows):
    @cached_property
    def _lengths(self) -> Tensor:
        """(K,) in float64: the lengths of the Gaussian rows over all parameters."""
        leaves = self._plane.leaves
        drawn = (self._working(position, leaf, 0, self.k) for position, leaf in enumerate(leaves))
        squares = [numbers.square().sum(1, dtype=torch.float64).to(leaves[0].device) for numbers in drawn]
        return torch.stack(squares).sum(0).sqrt()

    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        numbers = self._working(position, like, start, stop)
        numbers /= self._lengths[start:stop, None].to(numbers)
        return numbers.to(like.dtype).reshape(stop - start, *like.shape)


class _Frame(NormalRows):
    @cached_property
    def _parts(self) -> list[Tensor]:
        """(K, entries of the leaf) for each parameter, on the device of the first."""
        leaves = self._plane.leaves
        drawn = [self._working(position, leaf, 0, self.k) for position, leaf in enumerate(leaves)]
        wide = torch.float64 if any(part.dtype == torch.float64 for part in drawn) else torch.float32
        columns = torch.cat([part.to(drawn[0].device, wide).T for part in drawn])
        q, r = torch.linalg.qr(columns)
        q *= torch.where(r.diagonal() < 0, -1.0, 1.0).to(wide)
        return list(q.T.split([leaf.numel() for leaf in leaves], dim=1))

    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        part = self._parts[position][start:stop]
        return part.to(like.device, like.dtype).reshape(stop - start, *like.shape)
