"""Rows of a jet as float16, which has the 11 bits of TF32 at twice its speed, each row with a power of two of its own.

TF32 is float32 with 11 bits instead of 24. Float16 has as many, and a shorter exponent: numbers from 2^-14 to 2^15.
With the largest entry of a row moved to 2^14, entries of 2^-28 of it still have all their bits, and smaller ones an
error of 2^-39 of the largest.

For rows x_i of one factor and w_i of the other, row (i, j) of their product's jet is x_i w_j + x_j w_i. Both terms go
into the same sum, so the scales must agree:

    scale(x_i) scale(w_j) = scale(x_j) scale(w_i)        that is, scale(w_i) = scale(x_i) 2^shift for all i

A direction and its multiples therefore fare alike, and so does one that leaves a factor as it is (x_i = 0 or w_i = 0).
Where the ratio of x_i to w_i differs between directions, the smaller one of the two is moved to less than 2^14, by half
the spread of the ratios at most.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LIMIT", "SPREAD", "TOP", "halves"]

TOP = 14  # the exponent of the largest entry
LIMIT = 126  # of the exponents of scales: float32 has no reciprocal of a larger one
SPREAD = 28  # the most by which exponents of x_i / w_i may differ between directions; beyond, results are NaN


def halves(x: Tensor, w: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Rows x (T, ...), w (T, ...) and the pairs' rows of x as float16, and what takes the scales back.

    That is one float32 number for each row of x, of w and of ``second``, in one tensor: row (i, j) of the jet is to be
    multiplied by those of x_i and w_j, and what a row of ``second`` gives with w_0 by those of the two. Where no scales
    would do they are NaN. All tensors are contiguous.

    Example:
        >>> x, w = torch.tensor([[3.0], [1e20]]), torch.tensor([[2.0], [1e20]])
        >>> left, right, _, back = halves(x, w, None)
        >>> left.dtype, torch.allclose(left * back[:2, None], x, rtol=2**-11)
        (torch.float16, True)
    """
    left, right, *pairs, back = torch.ops.jetplane.halves(x, w, second)
    return left, right, pairs[0] if pairs else None, back


@torch.library.custom_op("jetplane::halves", mutates_args=())
def _operation(x: Tensor, w: Tensor, second: Tensor | None) -> list[Tensor]:
    """The halves of x, of w and, where there are any, of second rows, and the scales to go back."""
    if x.is_cuda:
        from .halves_triton import scaled

        return scaled(x, w, second)
    one, other = _exponents(x), _exponents(w)
    both = one.isfinite() & other.isfinite()
    low = (one - other).where(both, torch.inf).amin()
    high = (one - other).where(both, -torch.inf).amax()
    shift = torch.where(low <= high, ((low + high) / 2).floor(), 0.0)
    left = _room(torch.maximum(one, other + shift))
    exponents = [left, (left + shift).clamp(-LIMIT, LIMIT)]
    parts = [x, w]
    if second is not None:
        # a row that is nothing beside the other products is not made large: their sum is scaled with it
        i, j = torch.triu_indices(x.shape[0] - 1, x.shape[0] - 1, device=x.device) + 1
        beside = torch.maximum(one[i] + other[j], one[j] + other[i]) - other[0] - 2 * SPREAD
        exponents.append(_room(torch.maximum(_exponents(second), beside.where(beside.isfinite(), -torch.inf))))
        parts.append(second)
    back = torch.exp2(-torch.cat(exponents))
    found = [_moved(part, exponent) for part, exponent in zip(parts, exponents, strict=True)]
    return [*found, torch.where(high - low > SPREAD, torch.nan, back)]


@_operation.register_fake
def _(x: Tensor, w: Tensor, second: Tensor | None) -> list[Tensor]:
    parts = [x, w] if second is None else [x, w, second]
    back = x.new_empty(sum(part.shape[0] for part in parts))
    return [*(part.new_empty(part.shape, dtype=torch.float16) for part in parts), back]


def _exponents(rows: Tensor) -> Tensor:
    """For each row the least n such that its finite entries are smaller than 2^n; minus infinity for zeros."""
    size = rows.flatten(1).abs()
    size = size.where(size.isfinite(), 0.0).amax(1)
    return torch.where(size > 0, torch.frexp(size).exponent.to(rows.dtype), -torch.inf)


def _room(size: Tensor) -> Tensor:
    """The exponents by which rows of such sizes are to be scaled."""
    return (TOP - size.where(size.isfinite(), 0.0)).clamp(-LIMIT, LIMIT)


def _moved(rows: Tensor, exponents: Tensor) -> Tensor:
    scale = torch.exp2(exponents).reshape(-1, *[1] * (rows.ndim - 1))
    return (rows * scale).to(torch.float16)
