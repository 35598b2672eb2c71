"""Tangents that are not all there: rows of some directions alone, and rows that are outer products.

A direction that moves one layer has no tangents before it, and one whose weights are an outer product a b^T costs a
product with b and one with a in place of one with a matrix. Where second order begins at the loss, the model's part of
a pass keeps to that: a value carries the rows of the directions that it varies along, and no rows of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .jet import Operand

__all__ = [
    "Block",
    "Factors",
    "SparseOperand",
    "Support",
    "Term",
    "added",
    "gathered",
    "padded",
    "term_of",
    "with_outer",
]


@dataclass(frozen=True)
class Support:
    """Some of K directions, as runs [start, stop) that are increasing and apart.

    Example:
        >>> Support.of(8, [(4, 6), (0, 2), (2, 3)]).runs
        ((0, 3), (4, 6))
    """

    k: int
    runs: tuple[tuple[int, int], ...]

    @staticmethod
    def of(k: int, runs: Iterable[tuple[int, int]]) -> Support:
        """The union of runs in any order."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(runs):
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(stop, merged[-1][1])
            elif stop > start:
                merged.append((start, stop))
        return Support(k, tuple(merged))

    @staticmethod
    def all(k: int) -> Support:
        return Support(k, ((0, k),))

    @property
    def whole(self) -> bool:
        """Whether these are all directions."""
        return self.runs == ((0, self.k),)

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def place(self, start: int, stop: int) -> int | None:
        """Where direction ``start`` stands among these, if all up to ``stop`` are among them."""
        before = 0
        for low, high in self.runs:
            if low <= start and stop <= high:
                return before + start - low
            before += high - low
        return None


class Term(NamedTuple):
    """Rows of some directions."""

    support: Support
    rows: Tensor  # (count of the support, *S)


class Factors(NamedTuple):
    """Rows a_k b_k^T of a tensor (O, *rest)."""

    left: Tensor  # (n, O)
    right: Tensor  # (n, *rest)

    def dense(self) -> Tensor:
        """(n, O, *rest)"""
        return self.left.reshape(*self.left.shape, *(1,) * (self.right.ndim - 1)) * self.right.unsqueeze(1)

    def combined(self, coefficients: Tensor) -> Tensor:
        """sum_k c_k a_k b_k^T, (O, *rest), as one product."""
        flat = (self.left * coefficients.unsqueeze(1)).T @ self.right.flatten(1)
        return flat.reshape(self.left.shape[1], *self.right.shape[1:])


class Block(NamedTuple):
    """The rows of one tensor for the directions from ``start`` on."""

    start: int
    rows: Tensor | Factors

    @property
    def stop(self) -> int:
        return self.start + (self.rows.left if isinstance(self.rows, Factors) else self.rows).shape[0]

    def dense(self) -> Tensor:
        return self.rows.dense() if isinstance(self.rows, Factors) else self.rows


@dataclass(frozen=True, eq=False)
class SparseOperand(Operand):
    """A perturbed value with tangents of some directions alone, and further ones that are outer products.

    Only rules for products are given one; all others see the rows of the directions that one of their arguments has.
    """

    support: Support  # of the tangents
    outer: tuple[Block, ...] = ()  # with Factors

    def written_out(self) -> SparseOperand:
        """The same without outer products."""
        if not self.outer:
            return self
        blocks = [Term(Support.of(self.support.k, [(one.start, one.stop)]), one.dense()) for one in self.outer]
        term = gathered([*blocks, *([] if self.tangent is None else [Term(self.support, self.tangent)])])
        assert term is not None
        return SparseOperand(self.primal, term.rows, None, term.support)


def term_of(operand: Operand) -> Term | None:
    """All tangents of an operand with the directions that they belong to; None where there are none."""
    if isinstance(operand, SparseOperand):
        operand = operand.written_out()
    if operand.tangent is None:
        return None
    support = operand.support if isinstance(operand, SparseOperand) else Support.all(operand.tangent.shape[0])
    return Term(support, operand.tangent)


def gathered(terms: Sequence[Term]) -> Term | None:
    """The sum of rows that belong to different directions, None for zero.

    Example:
        >>> ones = torch.ones(2, 1)
        >>> term = gathered([Term(Support.of(4, [(0, 2)]), ones), Term(Support.of(4, [(1, 3)]), ones)])
        >>> term.support.runs, term.rows.flatten().tolist()
        (((0, 3),), [1.0, 2.0, 1.0])
    """
    if len(terms) < 2:
        return terms[0] if terms else None
    union = Support.of(terms[0].support.k, (run for term in terms for run in term.support.runs))
    parts = []
    for start, stop in _cuts([term.support for term in terms], union):
        places = [(term.rows, term.support.place(start, stop)) for term in terms]
        some = [rows[place : place + stop - start] for rows, place in places if place is not None]
        parts.append(sum(some[1:], some[0]))
    return Term(union, parts[0] if len(parts) == 1 else torch.cat(parts))


def with_outer(term: Term | None, support: Support, apply: Callable[..., Tensor]) -> Term:
    """The sum of a term and of the rows that ``apply`` makes, which are written to where they stand in it."""
    if term is None:
        return Term(support, apply())
    rows, (start, stop) = term.rows, support.runs[0]
    behind = start >= term.support.runs[-1][1]
    if not behind or type(rows) is not Tensor or rows.requires_grad:
        total = gathered([term, Term(support, apply())])
        assert total is not None
        return total
    joined = rows.new_empty((rows.shape[0] + stop - start, *rows.shape[1:]))
    joined[: rows.shape[0]] = rows
    apply(out=joined[rows.shape[0] :])
    return Term(Support.of(term.support.k, [*term.support.runs, *support.runs]), joined)


def added(term: Term, more: Term) -> Term:
    """The sum; of rows that belong to the caller alone, made in place where that can be."""
    runs = [(start, stop, term.support.place(start, stop)) for start, stop in more.support.runs]
    functional = type(term.rows) is not Tensor or term.rows.requires_grad or more.rows.requires_grad
    if functional or any(place is None for _, _, place in runs):
        total = gathered([term, more])
        assert total is not None
        return total
    number = 0
    for start, stop, place in runs:
        assert place is not None
        term.rows[place : place + stop - start].add_(more.rows[number : number + stop - start])
        number += stop - start
    return term


def padded(term: Term, wanted: Support) -> Tensor:
    """The rows of all ``wanted`` directions, of which the term's are some, with zeros for the others."""
    if term.support == wanted:
        return term.rows
    rows, parts = term.rows, []
    for start, stop in _cuts([term.support], wanted):
        place, count = term.support.place(start, stop), stop - start
        parts.append(rows.new_zeros((count, *rows.shape[1:])) if place is None else rows[place : place + count])
    return torch.cat(parts)


def _cuts(supports: Sequence[Support], union: Support) -> Iterator[tuple[int, int]]:
    """The runs of the union, cut where one of the supports begins or ends."""
    ends = sorted({end for support in (*supports, union) for run in support.runs for end in run})
    for start, stop in pairwise(ends):
        if union.place(start, stop) is not None:
            yield start, stop
