"""The algebra of nilpotent parts, in which the rules of linear algebra are written.

A perturbed matrix is a value plus a *nilpotent* part, A = A0 + a, where a product of three nilpotent parts vanishes.
The equation that defines a factorisation is solved for the nilpotent part of the factors by a fixed point iteration
around the factors of A0, and two rounds are exact through second order: the first round is exact to first order, and
each round gains one.

The rules read the value A0 with its own derivatives (an outer pass, autograd), so they nest and can be backpropagated
through. They are written with adjoints, which are transposes where matrices are real.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..algebra.families import align, spread, total
from ..algebra.jet import Operand, PairSet
from .products import MatMul


@dataclass(frozen=True, eq=False)
class Nil:
    """The nilpotent part of a jet: its rows, without the value. Matrices are the last two axes."""

    pairs: PairSet
    tangent: Tensor | None = None  # (K, *S), None for zero
    second: Tensor | None = None  # (rows, *S), None for zero

    def map(self, linear: Callable[[Tensor], Tensor]) -> Nil:
        """A linear function, one that leaves leading axes alone, of the rows."""
        tangent, second = (None if rows is None else linear(rows) for rows in (self.tangent, self.second))
        return Nil(self.pairs, tangent, second)

    @property
    def mT(self) -> Nil:
        return self.map(lambda rows: rows.mT)

    @property
    def mH(self) -> Nil:
        return self.map(lambda rows: rows.mH)

    @property
    def conj(self) -> Nil:
        return self.map(torch.conj)

    @property
    def real(self) -> Nil:
        return self.map(torch.real)

    @property
    def diagonal(self) -> Nil:
        return self.map(lambda rows: rows.diagonal(dim1=-2, dim2=-1))

    @property
    def trace(self) -> Nil:
        return self.diagonal.map(lambda rows: rows.sum(-1))

    def __neg__(self) -> Nil:
        return self.map(torch.neg)

    def __add__(self, other: Nil) -> Nil:
        return Nil(self.pairs, total((self.tangent, other.tangent)), total((self.second, other.second)))

    def __sub__(self, other: Nil) -> Nil:
        return self + -other

    def __mul__(self, other: Nil | Tensor | complex) -> Nil:
        if not isinstance(other, Nil):
            return self.map(lambda rows: rows * other)
        if self.tangent is None or other.tangent is None or not self.pairs.rows:
            return Nil(self.pairs)
        return Nil(self.pairs, None, self.pairs.cross(self.tangent, other.tangent))


def mm(*factors: Any) -> Any:
    """The matrix product of values and nilpotent parts."""
    left, *rest = factors
    for right in rest:
        left = _mm(left, right)
    return left


def _mm(a: Any, b: Any) -> Any:
    if isinstance(a, Nil) and isinstance(b, Nil):
        if a.tangent is None or b.tangent is None or not a.pairs.rows:
            return Nil(a.pairs)
        return Nil(a.pairs, None, a.pairs.bilinear(MatMul(), a.tangent, b.tangent))
    if isinstance(a, Nil):
        return a.map(lambda rows: torch.matmul(rows, b))
    return b.map(lambda rows: torch.matmul(a, rows)) if isinstance(b, Nil) else torch.matmul(a, b)


def nil(pairs: PairSet, x: Any, ndim: int | None = None) -> Nil:
    """The nilpotent part of an operand, zero for a constant, with ``ndim`` axes where batches broadcast."""
    if not isinstance(x, Operand):
        return Nil(pairs)
    ndim = x.primal.ndim if ndim is None else ndim
    return Nil(pairs, align(x.tangent, ndim), align(x.second, ndim))


def joined(value: Tensor, part: Nil) -> Operand:
    """The jet of a value and its nilpotent part."""
    return Operand(value, spread(part.tangent, value), spread(part.second, value))


def joined_along(parts: list[Nil], dim: int) -> Nil:
    def along(rows: list[Any]) -> Tensor | None:
        return None if all(r is None for r in rows) else torch.cat(rows, dim)

    return Nil(parts[0].pairs, along([p.tangent for p in parts]), along([p.second for p in parts]))


def strictly_lower(x: Nil) -> Nil:
    return x.map(lambda rows: rows.tril(-1))


def upper(x: Nil) -> Nil:
    return x.map(torch.triu)


def half_lower(x: Nil) -> Nil:
    """The triangular T with T + T^H = x, for a Hermitian x."""
    return x.map(lambda rows: rows.tril() - torch.diag_embed(rows.diagonal(dim1=-2, dim2=-1)) / 2)


def hermitian(x: Nil) -> Nil:
    return (x + x.mH) * 0.5


def inverse_less_one(u: Nil) -> Nil:
    """(I + u)^-1 - I = -u + u u."""
    return mm(u, u) - u


def is_vector(A: Tensor, B: Tensor) -> bool:
    """Whether torch.linalg.solve and lstsq take B for a batch of vectors."""
    return B.ndim == 1 or (A.ndim - 1 == B.ndim and A.shape[:-1] == B.shape)
