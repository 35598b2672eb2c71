"""Where in its storage a tensor's elements lie: which of them two tensors share, and which an operation writes.

Rows of the engine, replays of a program and forward gradients all ask it of the same three numbers of a view: shape,
strides and offset. An element is known by its place in the storage, offset + sum of index times stride.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Geometry",
    "are_kin",
    "as_pairs",
    "covers",
    "declared",
    "elements",
    "geometry",
    "inside",
    "overlap",
    "place",
    "span",
    "storage_order",
    "strided",
    "version_of",
    "written",
]

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, offset

# what these operations write, and the schemas of most of them do not declare
_BATCH_NORMS = (
    *("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm"),
    *("batch_norm", "instance_norm", "_batch_norm_impl_index"),  # as they are in inference mode: not taken apart
)
_STATISTICS = ("running_mean", "running_var")


def version_of(tensor: Tensor) -> int:
    """How many writes torch has counted to a tensor's memory; inference tensors are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def geometry(tensor: Tensor) -> Geometry:
    """Where in its storage the tensor's elements lie."""
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def as_pairs(place: Geometry) -> Geometry:
    """Where the real and imaginary parts of complex numbers lie, with an axis of two behind the others."""
    size, stride, offset = place
    return (*size, 2), (*(2 * step for step in stride), 1), 2 * offset


def place(tensor: Tensor) -> Geometry:
    """Where the tensor's real numbers lie, be they parts of complex ones: the same places for all views of a memory.

    Example:
        >>> x = torch.zeros(4, 2)
        >>> overlap(place(x[2:]), place(torch.view_as_complex(x)[:2]))
        False
    """
    return as_pairs(geometry(tensor)) if tensor.is_complex() else geometry(tensor)


def elements(tensor: Tensor, dtype: torch.dtype) -> int:
    """How many elements of a dtype the tensor's whole storage has, one that is there in part included."""
    return -(-tensor.untyped_storage().nbytes() // dtype.itemsize)


def are_kin(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether numbers of one dtype are numbers of the other, or pairs of them.

    Example:
        >>> are_kin(torch.complex64, torch.float32), are_kin(torch.complex64, torch.float64)
        (True, False)
    """
    return one == other or (one.is_complex != other.is_complex and one.to_real() == other.to_real())


def span(place: Geometry) -> tuple[int, int]:
    """The first and the last place that a view with elements uses.

    Example:
        >>> span(geometry(torch.zeros(4, 6)[1:3, 2:4]))
        (8, 15)
    """
    shape, strides, offset = place
    return offset, offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def _spans_meet(one: Geometry, other: Geometry) -> bool:
    """Whether the spans of two views have a place in common."""
    if 0 in one[0] or 0 in other[0]:
        return False
    (first, last), (low, high) = span(one), span(other)
    return first <= high and low <= last


def covers(tensor: Tensor) -> bool:
    """Whether the tensor is all of its storage, each element once."""
    # in bytes: memory of seven real numbers holds three complex ones, and more than them
    whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return whole and tensor.storage_offset() == 0 and _is_dense(tensor)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


def storage_order(size: tuple[int, ...], stride: tuple[int, ...]) -> list[int] | None:
    """The axes as their elements lie in memory, the outermost first; None where there are gaps or overlaps.

    Example:
        >>> storage_order((2, 3, 4), (12, 1, 3))
        [0, 2, 1]
    """
    order = sorted(range(len(size)), key=lambda axis: (stride[axis], size[axis]), reverse=True)
    expected = 1
    for axis in reversed(order):
        if size[axis] != 1 and stride[axis] != expected:
            return None
        expected *= size[axis]
    return order


def overlap(one: Geometry, other: Geometry) -> bool:
    """Whether two views of one storage have an element in common.

    Exact, but for views of many axes whose strides hardly divide one another: after ``_MOST`` trials the answer is that
    they do, as it is whenever they do.

    Example:
        >>> w = torch.zeros(4, 6)
        >>> left, right, even, odd = map(geometry, (w[:, :2], w[:, 2:], w[:, ::2], w[:, 1::2]))
        >>> overlap(left, right), overlap(even, odd), overlap(left, odd)
        (False, False, True)
    """
    if not _spans_meet(one, other):
        return False
    if one == other:
        return True
    # sum of i s over one's axes + sum of (m - 1 - j) t over the other's = difference of one's start from other's end
    room: dict[int, int] = {}  # by stride: the largest factor
    for shape, strides, _ in (one, other):
        for n, stride in zip(shape, strides, strict=True):
            if n > 1 and stride:
                room[stride] = room.get(stride, 0) + n - 1
    return _is_sum(span(other)[1] - one[2], sorted(room.items(), reverse=True))


_MOST = 4096  # trials


def _is_sum(total: int, terms: list[tuple[int, int]]) -> bool:
    """Whether ``total`` is a sum of x times stride over (stride, most) with 0 <= x <= most; True where unknown.

    The largest strides come first: what is left must be within reach of the others, and a multiple of their divisor.
    """
    reach = [0] * (len(terms) + 1)
    divisor = [0] * (len(terms) + 1)
    for place in reversed(range(len(terms))):
        stride, most = terms[place]
        reach[place], divisor[place] = reach[place + 1] + stride * most, math.gcd(divisor[place + 1], stride)
    waiting, trials = [(0, total)], 0
    while waiting:
        place, left = waiting.pop()
        trials += 1
        if place == len(terms) or left == 0 or trials > _MOST:
            return True
        if left % divisor[place]:
            continue
        stride, most = terms[place]
        low, high = max(0, -((reach[place + 1] - left) // stride)), min(most, left // stride)
        waiting += [(place + 1, left - stride * x) for x in range(low, min(high, low + _MOST) + 1)]
    return False


def inside(part: Geometry, whole: Geometry) -> bool:
    """Whether every element of one view is one of another view of the storage; False where that cannot be told.

    It can where the strides of ``part`` are steps along the axes of ``whole`` that never leave it: for all views of a
    tensor, be it dense or columns of a larger one, but for some that ``as_strided`` alone makes.

    Example:
        >>> w = torch.zeros(4, 6)
        >>> left, row, corner = map(geometry, (w[:, :3], w[1], w[2:, 1:3].T))
        >>> inside(corner, left), inside(row, left), inside(left, geometry(w))
        (True, False, True)
    """
    if part == whole or 0 in part[0]:
        return True
    if 0 in whole[0]:
        return False
    (first, last), (low, high) = span(part), span(whole)
    if first < low or high < last:
        return False
    axes = _merged(whole)
    *digits, remainder = _last_corner(part, first - low, axes)
    return not remainder and all(digit < n for digit, (_, n) in zip(digits, axes, strict=True))


def _last_corner(part: Geometry, start: int, axes: list[tuple[int, int]]) -> list[int]:
    """Where the last element of a view lies along the axes of another one, and what remains."""
    corner = _digits(start, axes)
    for n, stride in zip(part[0], part[1], strict=True):
        if n > 1:
            corner = [at + (n - 1) * step for at, step in zip(corner, _digits(stride, axes), strict=True)]
    return corner


def _merged(place: Geometry) -> list[tuple[int, int]]:
    """(stride, size) of the axes along which a view has more than one element, the largest stride first.

    Axes that one runs through without a gap are one.
    """
    axes: list[tuple[int, int]] = []
    for stride, n in sorted((stride, n) for n, stride in zip(place[0], place[1], strict=True) if n > 1 and stride):
        if axes and stride == axes[-1][0] * axes[-1][1]:
            axes[-1] = axes[-1][0], axes[-1][1] * n
        else:
            axes.append((stride, n))
    return axes[::-1]


def _digits(distance: int, axes: list[tuple[int, int]]) -> list[int]:
    """How many steps along each axis make up the distance, and what remains."""
    digits = []
    for stride, _ in axes:
        digit, distance = divmod(distance, stride)
        digits.append(digit)
    return [*digits, distance]


def strided(values: Iterable[Any]) -> list[Tensor]:
    """The tensors in a memory of their own among some values, in lists and dicts too.

    By hand: torch's trees take longer than a small operation.

    Example:
        >>> strided([1.0, (torch.ones(1), {"x": torch.zeros(1)})])
        [tensor([1.]), tensor([0.])]
    """
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                found.append(value)
        elif isinstance(value, list | tuple):
            found += strided(value)
        elif isinstance(value, dict) and value:
            found += strided(value.values())
    return found


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes into: those of its schema, and a batch norm's running statistics.

    Example:
        >>> x = torch.zeros(2)
        >>> [tensor is x for tensor in written(torch.ops.aten.add_.Tensor, (x, 1.0), {})]
        [True]
        >>> written(torch.ops.aten.add.Tensor, (x, 1.0), {})
        []
    """
    found: list[Tensor] = []
    for position, name in _destinations(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        found += [one for one in (value if isinstance(value, list | tuple) else (value,)) if isinstance(one, Tensor)]
    return found


@cache
def _destinations(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an overload writes into."""
    if torch.Tag.inplace_view in func.tags:
        return ()  # transpose_ and its like change where the tensor looks, and no memory
    names = declared(func) + (_STATISTICS if func.overloadpacket.__name__ in _BATCH_NORMS else ())
    return tuple((place, one.name) for place, one in enumerate(func._schema.arguments) if one.name in names)


def declared(func: Any) -> tuple[str, ...]:
    """The names of the arguments that an overload's schema says it writes, be it their geometry alone."""
    arguments = func._schema.arguments
    return tuple(one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write)
