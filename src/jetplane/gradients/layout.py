"""Which entries of an activation belong to which sample: a guess, and the probe that proves it.

Entry i along axis ``axis`` belongs to sample (i // inner) % B. A probe carries tangents that are NaN in the entries of
some samples and zero in the others; a loss that becomes NaN depends on one of them. NaN passes through weights that are
zero, where a finite tangent would vanish.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Layout", "candidates", "codes"]

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

    def split(self, rows: Tensor, samples: int) -> Tensor:
        """Rows (K, *S) by sample, (K, B, n): the same places of S in the same order for every sample."""
        k, *shape = rows.shape
        return rows.reshape(k, *self._parts(shape, samples)).movedim(3, 1).reshape(k, samples, -1)

    def join(self, numbers: Tensor, shape: Sequence[int]) -> Tensor:
        """Numbers (B, n) at the places (*S) that :meth:`split` took them from.

        Example:
            >>> x = torch.arange(12.0).reshape(6, 2)
            >>> assert torch.equal(Layout(0, 1).join(Layout(0, 1).split(x[None], 3)[0], x.shape), x)
        """
        before, outer, samples, *rest = self._parts(shape, numbers.shape[0])
        return numbers.reshape(samples, before, outer, *rest).movedim(0, 2).reshape(tuple(shape))

    def _parts(self, shape: Sequence[int], samples: int) -> tuple[int, ...]:
        before, after = math.prod(shape[: self.axis]), math.prod(shape[self.axis + 1 :])
        return before, shape[self.axis] // (samples * self.inner), samples, self.inner, after


def candidates(shape: Sequence[int], samples: int) -> list[Layout]:
    """The layouts that a shape allows, the usual ones first: batch-major, then sequence-major, then in between.

    Example:
        >>> candidates((4, 6, 5), 2)[:2]
        [Layout(axis=0, inner=2), Layout(axis=0, inner=1)]
    """
    found = [
        layout
        for axis, size in enumerate(shape)
        if size and size % samples == 0
        for layout in _of(axis, size // samples)
    ]
    exact = [layout for layout in found if shape[layout.axis] == samples]
    return (exact + [layout for layout in found if layout not in exact])[:_MOST]


def _of(axis: int, rest: int) -> Iterator[Layout]:
    yield Layout(axis, rest)
    if rest > 1:
        yield Layout(axis, 1)
    yield from (Layout(axis, inner) for inner in range(2, rest) if rest % inner == 0)


def codes(samples: int, device: torch.device) -> Tensor:
    """Subsets of the samples (subsets, B) such that for any two samples some subset holds the first and not the second.

    Example:
        >>> codes(3, torch.device("cpu")).int().tolist()
        [[0, 1, 0], [0, 0, 1], [1, 0, 1], [1, 1, 0]]
    """
    bits = torch.arange(max(1, (samples - 1).bit_length()), device=device).unsqueeze(1)
    ones = (torch.arange(samples, device=device) >> bits & 1).bool()
    return torch.cat([ones, ~ones])
