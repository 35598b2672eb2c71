"""The kernels behind :mod:`.halves`: one finds the largest entry of each row, the other scales and rounds.

The scales are a few integers, which every program of the second kernel makes for itself out of what the first has
found. Under Triton's interpreter (TRITON_INTERPRET=1) the kernels run on a CPU, too.
"""

# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import halves

__all__ = ["scaled"]

_BLOCK = 2048  # entries at a time
_TURNS = 4  # blocks of a program

_TOP, _LIMIT, _SPREAD = (tl.constexpr(value) for value in (halves.TOP, halves.LIMIT, halves.SPREAD))
_NONE = tl.constexpr(-100_000)  # the exponent of a row of zeros


def scaled(x: Tensor, w: Tensor, second: Tensor | None) -> list[Tensor]:
    """The halves of x (T, ...), of w (T, ...) and of second rows, and the scales to go back. All are contiguous."""
    parts = [x, w] if second is None else [x, w, second]
    made = [torch.empty_like(part, dtype=torch.float16) for part in parts]
    rows = [part.shape[0] for part in parts]
    sizes = [part.numel() // part.shape[0] for part in parts]
    blocks = [max(1, triton.cdiv(size, _BLOCK * _TURNS)) for size in sizes]
    largest = torch.zeros(sum(rows), dtype=torch.int32, device=x.device)
    back = torch.empty(sum(rows), dtype=torch.float32, device=x.device)
    programs = sum(count * each for count, each in zip(rows, blocks, strict=True))
    if second is None:  # something has to be there
        parts, made, sizes, blocks = [*parts, x], [*made, made[0]], [*sizes, 0], [*blocks, 1]
    fixed = {"ROWS": rows[0], "BLOCK": _BLOCK, "TURNS": _TURNS, "WIDE": triton.next_power_of_2(rows[0])}
    _largest[programs,](*parts, largest, *sizes, *blocks, **fixed)
    _scaled[programs,](*parts, *made, largest, back, *sizes, *blocks, **fixed)
    return [*made[: len(rows)], back]


@triton.jit
def _largest(
    x,
    w,
    second,
    largest,
    x_size,
    w_size,
    second_size,
    x_blocks,
    w_blocks,
    second_blocks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Into ``largest`` the bits of the largest finite entry of each row: as integers they have the same order."""
    part, row, block = _place(x_blocks, w_blocks, second_blocks, ROWS)
    if part == 0:
        _largest_of(x, row, block, x_size, largest, BLOCK, TURNS)
    elif part == 1:
        _largest_of(w, row, block, w_size, largest + ROWS, BLOCK, TURNS)
    else:
        _largest_of(second, row, block, second_size, largest + 2 * ROWS, BLOCK, TURNS)


@triton.jit
def _scaled(
    x,
    w,
    second,
    x_made,
    w_made,
    second_made,
    largest,
    back,
    x_size,
    w_size,
    second_size,
    x_blocks,
    w_blocks,
    second_blocks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Rows with their scales as float16, and the scales to go back."""
    part, row, block = _place(x_blocks, w_blocks, second_blocks, ROWS)
    at = tl.arange(0, WIDE)
    one = _exponents(tl.load(largest + at, mask=at < ROWS, other=0))
    other = _exponents(tl.load(largest + ROWS + at, mask=at < ROWS, other=0))
    both = (one > _NONE) & (other > _NONE)
    low = tl.min(tl.where(both, one - other, -_NONE))
    high = tl.max(tl.where(both, one - other, _NONE))
    shift = tl.where(low <= high, (low + high) >> 1, 0)  # rounded down
    moved = tl.where(other > _NONE, other + shift, _NONE)
    left = _room(tl.maximum(one, moved))
    if part == 0:
        exponent = _at(left, at, row)
        _scaled_of(x, x_made, row, block, x_size, exponent, BLOCK, TURNS)
    elif part == 1:
        exponent = tl.minimum(tl.maximum(_at(left, at, row) + shift, -_LIMIT), _LIMIT)
        _scaled_of(w, w_made, row, block, w_size, exponent, BLOCK, TURNS)
    else:
        # rows i <= j of the pair, by where the pairs of each i begin
        begin = at * (ROWS - 1) - at * (at - 1) // 2
        i = tl.sum(((begin <= row) & (at < ROWS - 1)).to(tl.int32))
        j = row - _at(begin, at, i - 1) + i
        value = _at(other, at, 0)
        beside = tl.maximum(
            _sum(_at(one, at, i), _at(other, at, j), value), _sum(_at(one, at, j), _at(other, at, i), value)
        )
        size = _exponents(tl.load(largest + 2 * ROWS + row))
        exponent = _room(tl.maximum(size, beside))
        _scaled_of(second, second_made, row, block, second_size, exponent, BLOCK, TURNS)
    if block == 0:
        scale = tl.where(high - low > _SPREAD, float("nan"), _power(-exponent))
        tl.store(back + part * ROWS + row, scale)


@triton.jit
def _place(x_blocks, w_blocks, second_blocks, ROWS: tl.constexpr):
    """Which tensor, row and block of it are this program's."""
    program = tl.program_id(0)
    of_x = ROWS * x_blocks
    of_w = ROWS * w_blocks
    part = (program >= of_x).to(tl.int32) + (program >= of_x + of_w).to(tl.int32)
    blocks = tl.where(part == 0, x_blocks, tl.where(part == 1, w_blocks, second_blocks))
    within = program - tl.where(part == 0, 0, tl.where(part == 1, of_x, of_x + of_w))
    return part, within // blocks, within % blocks


@triton.jit
def _largest_of(rows, row, block, size, largest, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    line = rows + row.to(tl.int64) * size
    most = tl.zeros((BLOCK,), tl.float32)
    for turn in tl.static_range(TURNS):
        at = (block * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        entry = tl.abs(tl.load(line + at, mask=at < size, other=0.0))
        most = tl.maximum(most, tl.where(entry < float("inf"), entry, 0.0))
    tl.atomic_max(largest + row, tl.max(most).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _scaled_of(rows, made, row, block, size, exponent, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    start = row.to(tl.int64) * size
    scale = _power(exponent)
    for turn in tl.static_range(TURNS):
        at = (block * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        entry = tl.load(rows + start + at, mask=at < size, other=0.0)
        tl.store(made + start + at, (entry * scale).to(tl.float16), mask=at < size)


@triton.jit
def _exponents(bits):
    """The n such that numbers of these bits are smaller than 2^n, and at least half of it."""
    return tl.where(bits > 0, (bits >> 23) - 126, _NONE)


@triton.jit
def _room(size):
    """The exponent by which a row of such a size is to be scaled."""
    return tl.where(size > _NONE, tl.minimum(tl.maximum(_TOP - size, -_LIMIT), _LIMIT), _TOP)


@triton.jit
def _sum(one, other, value):
    """The size of a second row beside which products of rows of these sizes would count, but not much."""
    there = (one > _NONE) & (other > _NONE) & (value > _NONE)
    return tl.where(there, one + other - value - 2 * _SPREAD, _NONE)


@triton.jit
def _at(values, at, place):
    return tl.sum(tl.where(at == place, values, 0))


@triton.jit
def _power(exponent):
    """Two to the power of an integer."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
