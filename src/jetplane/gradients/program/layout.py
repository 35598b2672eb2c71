"""Which entries of an activation belong to which sample: a guess, and the probe that proves it.

Entry i along axis ``axis`` belongs to sample (i // inner) % B. A probe carries tangents that are NaN in the entries of
some samples and zero in the others; a loss that becomes NaN depends on one of them. NaN passes through weights that are
zero, where a finite tangent would vanish.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

__all__ = ["Grid", "Layout", "candidates", "codes", "guess", "within"]

_MOST = 12  # candidates for one activation


@dataclass(frozen=True)
class Layout:
    """Where the samples of an activation lie.

    Example:
        >>> Layout(0, 3).spread(torch.tensor([1.0, 2.0]), torch.Size([6, 1])).flatten()
        tensor([1., 1., 1., 2., 2., 2.])
        >>> Layout(0, 1).spread(torch.tensor([1.0, 2.0]), torch.Size([6, 1])).flatten()
        tensor([1., 2., 1., 2., 1., 2.])
    """

    axis: int
    inner: int

    def spread(self, numbers: Tensor, shape: Sequence[int]) -> Tensor:
        """Numbers (..., B) as factors (..., 1, n, 1) that broadcast against (..., *shape)."""
        size = shape[self.axis]
        lead, samples = numbers.shape[:-1], numbers.shape[-1]
        outer = size // (samples * self.inner)
        full = numbers.reshape(*lead, 1, samples, 1).expand(*lead, outer, samples, self.inner).reshape(*lead, size)
        before, after = (1,) * self.axis, (1,) * (len(shape) - self.axis - 1)
        return full.reshape(*lead, *before, size, *after)


@dataclass(frozen=True)
class Grid:
    """Where the samples of an activation lie, and, if that is known, the tokens of each: two layouts."""

    samples: Layout
    tokens: Layout | None = None

    def split(self, rows: Tensor, samples: int, tokens: int = 1) -> Tensor:
        """Rows (K, *S) by sample and token, (K, B, T, n): the same places of S in the same order for all of them.

        Example:
            >>> x = torch.arange(12.0).reshape(1, 6, 2)  # tokens of a sample follow each other
            >>> Grid(Layout(0, 3), Layout(0, 1)).split(x, 2, 3)[0, 1, 0]
            tensor([6., 7.])
        """
        k, *shape = rows.shape
        view, places = self.digits(shape, samples, tokens)
        apart = rows.reshape(k, *view).movedim([place + 1 for place in places], [1, 2])
        return apart.reshape(k, samples, tokens, -1)

    def join(self, numbers: Tensor, shape: Sequence[int]) -> Tensor:
        """Numbers (B, T, n) at the places (*S) that :meth:`split` took them from.

        Example:
            >>> x, grid = torch.arange(12.0).reshape(6, 2), Grid(Layout(0, 1))
            >>> assert torch.equal(grid.join(grid.split(x[None], 3)[0], x.shape), x)
        """
        view, places = self.digits(shape, *numbers.shape[:2])
        rest = [size for place, size in enumerate(view) if place not in places]
        return numbers.reshape(*numbers.shape[:2], *rest).movedim([0, 1], places).reshape(tuple(shape))

    def weighted(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """The sum of rows (K, *S) that are multiplied by the numbers (K, B, T) of their samples and tokens, (*S)."""
        k, *shape = rows.shape
        view, places = self.digits(shape, *numbers.shape[1:])
        factor = numbers.reshape(*numbers.shape, *(1,) * (len(view) - 2)).movedim([1, 2], [p + 1 for p in places])
        return (rows.reshape(k, *view) * factor).sum(0).reshape(tuple(shape))

    def digits(self, shape: Sequence[int], samples: int, tokens: int = 1) -> tuple[list[int], list[int]]:
        """A shape in which samples and tokens have an axis each, and which axes they are."""
        marks = [(self.samples.axis, self.samples.inner, samples, 0)]
        if self.tokens is not None:
            marks.append((self.tokens.axis, self.tokens.inner, tokens, 1))
        view, places = list[int](), [0, 0]
        for axis, size in enumerate(shape):
            rest = size
            for _, inner, count, which in sorted((mark for mark in marks if mark[0] == axis), reverse=True):
                view += [rest // (inner * count), count]
                places[which] = len(view) - 1
                rest = inner
            view.append(rest)
        if self.tokens is None:  # all of it is one token
            places[1] = len(view)
            view.append(1)
        return view, places


def candidates(shape: Sequence[int], samples: int) -> list[Layout]:
    """The layouts that a shape allows, the usual ones first: batch-major, then sequence-major, then in between.

    Example:
        >>> candidates((4, 6, 5), 2)[:2]
        [Layout(axis=0, inner=2), Layout(axis=0, inner=1)]
    """
    axes = [axis for axis, size in enumerate(shape) if size and size % samples == 0]
    found = [layout for axis in axes for layout in _of(axis, shape[axis] // samples)]
    found.sort(key=lambda layout: shape[layout.axis] != samples)  # those that a whole axis tells come first
    return found[:_MOST]


def _of(axis: int, rest: int) -> Iterator[Layout]:
    yield Layout(axis, rest)
    if rest > 1:
        yield Layout(axis, 1)
    yield from (Layout(axis, inner) for inner in range(2, rest) if rest % inner == 0)


def within(shape: Sequence[int], layout: Layout, samples: int, tokens: int) -> list[Layout]:
    """The layouts of tokens that go with one of samples: no two of either share a place in both.

    Example:
        >>> within((6, 5), Layout(0, 3), 2, 3)
        [Layout(axis=0, inner=1)]
    """
    return [other for other in candidates(shape, tokens) if _is_apart(shape, (layout, samples), (other, tokens))]


def _is_apart(shape: Sequence[int], *counted: tuple[Layout, int]) -> bool:
    (one, few), (other, many) = sorted(counted, key=lambda pair: pair[0].inner)
    if one.axis != other.axis:
        return True
    return other.inner % (one.inner * few) == 0 and shape[other.axis] % (other.inner * many) == 0


@cache
def guess(shape: torch.Size, samples: int) -> Layout | None:
    """The usual layout, not proven."""
    return next(iter(candidates(shape, samples)), None)


def codes(samples: int, device: torch.device) -> Tensor:
    """Subsets of the samples (subsets, B) such that for any two samples some subset holds the first and not the second.

    Example:
        >>> codes(3, torch.device("cpu")).int().tolist()
        [[0, 1, 0], [0, 0, 1], [1, 0, 1], [1, 1, 0]]
    """
    bits = torch.arange(max(1, (samples - 1).bit_length()), device=device).unsqueeze(1)
    ones = (torch.arange(samples, device=device) >> bits & 1).bool()
    return torch.cat([ones, ~ones])
