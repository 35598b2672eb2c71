"""Arithmetic on parameters that are alike, several at once: few launches, and a working set that stays small.

In a trace the operations are plain ones, which a compiler puts together by itself; the numbers that all parameters of
a bunch are multiplied by are made once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from ...ad import _torch
from ...ad._torch import foreach

__all__ = [
    "AT_ONCE",
    "against",
    "all_finite",
    "bunches",
    "divided",
    "finite",
    "followed",
    "keep",
    "lerped",
    "plus",
    "scaled",
    "sizes",
    "times",
]

AT_ONCE = 1 << 24  # bytes of one bunch, unless one parameter alone has more
_MANY = list[Tensor] | tuple[Tensor, ...]


def bunches(leaves: _MANY, kinds: Iterable[Hashable], counts: Iterable[int]) -> list[list[int]]:
    """Places of the parameters by bunch: of one kind, dtype and device each, and of few bytes, which ``counts`` says.

    Example:
        >>> leaves = [torch.zeros(2), torch.zeros(3), torch.zeros(1, dtype=torch.float64), torch.zeros(4)]
        >>> bunches(leaves, "aaab", [8, 12, 8, 16])
        [[0, 1], [2], [3]]
    """
    found: list[list[int]] = []
    last: dict[Hashable, tuple[list[int], int]] = {}  # by kind: the last bunch, and its bytes
    for place, (leaf, kind, size) in enumerate(zip(leaves, kinds, counts, strict=True)):
        key = kind, leaf.dtype, leaf.device
        places, so_far = last.get(key, ([], AT_ONCE))
        if so_far + size > AT_ONCE:
            places, so_far = [], 0
            found.append(places)
        places.append(place)
        last[key] = places, so_far + size
    return found


def _traced(tensor: Tensor) -> bool:
    return _torch.is_fake(type(tensor))


def times(ones: _MANY, other: Tensor | _MANY) -> list[Tensor]:
    """Each times a number (), or times its own."""
    if _traced(ones[0]):
        return [
            one * by for one, by in zip(ones, [other] * len(ones) if isinstance(other, Tensor) else other, strict=True)
        ]
    return list(foreach.mul(ones, other))


def scaled(ones: _MANY, number: Tensor) -> _MANY:
    """Each times a number (), in place."""
    if _traced(ones[0]):
        return [one.mul_(number) for one in ones]
    foreach.mul_(ones, number)
    return ones


def divided(ones: _MANY, number: Tensor) -> list[Tensor]:
    """Each by a number ()."""
    return [one / number for one in ones] if _traced(ones[0]) else list(foreach.div(ones, number))


def plus(ones: _MANY, others: _MANY | float) -> _MANY:
    """Each and its own one, or a number, in place."""
    if _traced(ones[0]):
        if isinstance(others, float):
            return [one.add_(others) for one in ones]
        return [one.add_(other) for one, other in zip(ones, others, strict=True)]
    foreach.add_(ones, others)
    return ones


def lerped(means: _MANY, new: _MANY, share: float | Tensor) -> list[Tensor]:
    """Each a ``share`` of the way to its new one."""
    if _traced(means[0]) or isinstance(share, Tensor):
        return [torch.lerp(mean, one, share) for mean, one in zip(means, new, strict=True)]
    return list(foreach.lerp(means, new, share))


def sizes(squares: _MANY, correction: Tensor) -> list[Tensor]:
    """sqrt(square) / correction."""
    if _traced(squares[0]):
        return [square.sqrt().div_(correction) for square in squares]
    found = list(foreach.sqrt(squares))
    foreach.div_(found, correction)
    return found


def against(means: list[Tensor], sizes: _MANY) -> list[Tensor]:
    """-mean / size, in place."""
    if _traced(means[0]):
        return [mean.neg_().div_(size) for mean, size in zip(means, sizes, strict=True)]
    foreach.neg_(means)
    foreach.div_(means, sizes)
    return means


def followed(means: _MANY, places: _MANY, share: Tensor) -> list[Tensor]:
    """(place - mean) share + mean."""
    if _traced(means[0]):
        return [(place - mean).mul_(share).add_(mean) for mean, place in zip(means, places, strict=True)]
    found = list(foreach.sub(places, means))
    foreach.mul_(found, share)
    foreach.add_(found, means)
    return found


def keep(taken: Tensor, new: _MANY, places: _MANY) -> None:
    """Put new values in their places, if the step is ``taken``."""
    traced = _traced(places[0])
    for one, place in zip(new, places, strict=True):
        if traced:
            place.copy_(torch.where(taken, one, place))
        else:
            torch.where(taken, one, place, out=place)


def finite(tensors: _MANY) -> Tensor:
    """(n,): whether all entries of each are finite."""
    if _traced(tensors[0]) or not all(tensor.numel() for tensor in tensors):
        return torch.stack([torch.isfinite(tensor).all() for tensor in tensors])
    return torch.isfinite(torch.stack(foreach.norm(tensors, torch.inf)))


def all_finite(tensors: _MANY) -> Tensor:
    """(): whether all entries of all are finite."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return torch.cat([finite(some) for some in by_dtype.values()]).all()
