"""All rows of a convolution's jet from one read of its windows: for CUDA devices with warp-group matrix instructions.

With the value as row 0 of x and w and the tangents as rows 1 to K, every row of the jet is one of the sums

    out[i, j] = x_i * w_j + x_j * w_i      i < j        tangents (i = 0) and mixed pairs
    out[i, i] = 2 x_i * w_i                i > 0        the pairs (i, i)
    out[0, 0] = x_0 * w_0                               the value

in the order of ``PairSet.all(K + 1)``; plus x_ij * w_0 where x has second rows, plus the rows of the bias. A library
makes all (K + 1)^2 products, writes them, and leaves the sums to another kernel. Here both terms of a sum are added up
in registers, and only the sums are written.

A program makes some of the sums (a :class:`Pattern`) for a tile of output positions, as an implicit matrix product:
with channels last, each row of a window is one run of width * channels numbers. In place of TF32 it takes rows of
float16 with scales (:mod:`.halves`). docs/convolution-kernel.md has the floor, and why the patterns and tiles are what
they are.

Under Triton's interpreter (TRITON_INTERPRET=1) the kernel runs on a CPU, too.
"""

# mypy: disable-error-code="no-untyped-def, assignment, var-annotated"
# ruff: noqa: RUF005 - Triton adds tuples, and does not unpack them

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "DIAGONAL",
    "OFF",
    "PENTAGON",
    "SQUARE",
    "TRIANGLE",
    "Pattern",
    "Tile",
    "constants",
    "convolve",
    "corners",
    "kept",
    "numbers",
    "plan",
    "tile_of",
    "weights",
]


Groups = tuple[tuple[int, ...], ...]  # rows
Terms = tuple[tuple[int, int, int], ...]  # (sum, row of x, row of w), one product each


@dataclass(frozen=True)
class Pattern:
    """The sums of one program, for rows by their place in a group: the same for many groups.

    Each phase is a pass over the windows that reads the rows of its terms once. A sum with two terms in one phase makes
    the second product wait for the first; in two phases there is nothing to wait for, but rows may be read twice.
    """

    phases: tuple[Terms, ...]
    sums: tuple[tuple[int, int], ...]  # the rows i, j that each sum is for
    merged: tuple[tuple[int, int], ...] = ()  # (sum, other): the other one is added when all products are made

    def passes(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], Terms], ...]:
        """For each phase the rows of x and of w that it reads, and its terms by their places in these."""
        found = []
        for terms in self.phases:
            xs, ws = (tuple(sorted({term[side] for term in terms})) for side in (1, 2))
            found.append((xs, ws, tuple((n, xs.index(i), ws.index(j)) for n, i, j in terms)))
        return tuple(found)


_GRID = ((0, 0, 2), (1, 0, 3), (2, 1, 2), (3, 1, 3))  # rows 0 and 1 of x with rows 2 and 3 of w
_BACK = tuple((n, j, i) for n, i, j in _GRID)
_TWO = ((0, 1, 1), (1, 1, 2), (1, 2, 1), (2, 2, 2))  # rows 1 and 2 among themselves, and then with row 0
_THIRD = ((3, 0, 1), (3, 1, 0), (4, 0, 2), (4, 2, 0))

SQUARE = Pattern((_GRID, _BACK), ((0, 2), (0, 3), (1, 2), (1, 3)))  # two rows with two others
DIAGONAL = Pattern((((0, 0, 0), (1, 0, 1), (2, 1, 1), (3, 1, 0)),), ((0, 0), (0, 1), (1, 1)), ((1, 3),))  # two rows
PENTAGON = Pattern((_TWO + _THIRD,), ((1, 1), (1, 2), (2, 2), (0, 1), (0, 2)))  # two rows, also with a third
TRIANGLE = Pattern((_TWO + _THIRD + ((5, 0, 0),),), (*PENTAGON.sums, (0, 0)))  # three rows


def plan(rows: int) -> dict[Pattern, Groups]:
    """The groups of rows of each pattern, which together make every pair of ``rows`` rows once.

    Rows go two by two. Where their number is odd, row 0 goes with each of the twos.

    Example:
        >>> plan(4)[SQUARE], plan(4)[DIAGONAL], plan(3)[TRIANGLE]
        (((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 1, 2),))
    """
    odd = rows % 2
    twos = [(i, i + 1) for i in range(odd, rows, 2)]
    squares = tuple((*one, *other) for n, one in enumerate(twos) for other in twos[n + 1 :])
    if odd:
        found = {TRIANGLE: ((0, *twos[0]),), PENTAGON: tuple((0, *two) for two in twos[1:]), SQUARE: squares}
    else:
        found = {DIAGONAL: tuple(twos), SQUARE: squares}
    return {pattern: groups for pattern, groups in found.items() if groups}


@dataclass(frozen=True)
class Tile:
    """How a program works; what it computes does not depend on it."""

    positions: int = 128  # of the output
    depth: int = 128  # bytes of a window that are read at a time
    warps: int = 8
    stages: int = 3
    near: bool = True  # read x through the L1 cache: windows overlap


def tile_of(pattern: Pattern) -> Tile:
    """A tile whose sums stay in registers: from the compiler's report, for float16, 64 channels and sm_90."""
    return Tile() if len(pattern.sums) + len(pattern.merged) <= 4 else Tile(depth=64)


def convolve(
    x: Tensor,  # (T, N, H, W, C)
    w: Tensor,  # (T, O, height, width, C)
    second: Tensor | None,  # ((T-1)T/2, N, H, W, C), the pairs of rows 1 and up
    scale: Tensor | None,  # (T + T,), with second rows (T + T + (T-1)T/2,)
    bias: Tensor | None,  # (T, O)
    stride: Sequence[int],
    dilation: Sequence[int],
    shape: tuple[int, int, int, int],  # (N, OH, OW, O)
    codes: Tensor | None = None,  # (N, OH, OW, O)
    patterns: dict[Pattern, Groups] | None = None,
    tiles: Callable[[Pattern], Tile] = tile_of,
) -> Tensor:
    """The rows (T(T+1)/2, N, OH, OW, O) of the jet. All tensors are contiguous.

    With ``codes`` they are those of the convolution with ReLU and max-pooling behind it: OH and OW are then what is
    left of them, and the codes say which of four positions is kept. With ``scale`` products are multiplied by the
    numbers in it for their two rows, as :func:`jetplane.ad.kernels.halves.halves` makes them; rows have its dtype.
    """
    rows, positions = x.shape[0], shape[0] * shape[1] * shape[2] * (1 if codes is None else 4)
    dtype = x.dtype if scale is None else scale.dtype
    out = torch.empty((rows * (rows + 1) // 2, *shape), dtype=dtype, device=x.device)
    if not out.numel():
        return out
    for pattern, groups in (patterns or plan(rows)).items():
        tile = tiles(pattern)
        given = (codes is not None, scale is not None)
        fixed = constants(x, w, second, bias, stride, dilation, shape, pattern, groups, tile, *given)
        unit, blocks = fixed["UNIT"], triton.cdiv(shape[3], fixed["WIDE"])
        kernel = _sums[triton.cdiv(positions, tile.positions) * blocks * len(groups),](
            x,
            w,
            x if second is None else second,
            out if scale is None else scale,
            w if bias is None else bias,
            out if codes is None else codes,
            out,
            positions,
            0,
            x[0].numel() // unit,
            w[0].numel() // unit,
            out[0].numel(),
            **fixed,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if tile.near and kernel is not None:
            _leave_room(kernel.function, kernel.metadata.shared)
    return out


def constants(
    x: Tensor,
    w: Tensor,
    second: Tensor | None,
    bias: Tensor | None,
    stride: Sequence[int],
    dilation: Sequence[int],
    shape: tuple[int, int, int, int],
    pattern: Pattern,
    groups: Groups,
    tile: Tile,
    pool: bool = False,
    scaled: bool = False,
) -> dict[str, Any]:
    """What the kernel is compiled for."""
    x_rows, w_rows, terms = zip(*pattern.passes(), strict=True)
    to, left, right = (tuple(tuple(term[n] for term in phase) for phase in terms) for n in range(3))
    # steps between rows come in units of up to 16 bytes, so that the compiler knows of them
    unit = math.gcd(16 // x.element_size(), x.shape[-1])
    return {
        "GROUPS": groups,
        "X_ROWS": x_rows,
        "W_ROWS": w_rows,
        "TO": to,
        "LEFT": left,
        "RIGHT": right,
        "SUMS": pattern.sums,
        "MERGED": pattern.merged,
        "ROWS": x.shape[0],
        "SIZE": tuple(x.shape[2:]),
        "WINDOW": tuple(w.shape[2:4]),
        "OUT": tuple(shape[1:]),
        "STRIDE": tuple(stride),
        "DILATION": tuple(dilation),
        "BIAS": bias is not None,
        "SECOND": second is not None,
        "SCALED": scaled,
        "UNIT": unit,
        "NEAR": 8 // x.element_size() if tile.near else 0,
        "POSITIONS": tile.positions,
        "WIDE": min(64, max(16, triton.next_power_of_2(shape[3]))),
        "DEPTH": max(16, tile.depth // x.element_size()),
        "POOL": pool,
    }


@functools.cache
def _leave_room(function: int, shared: int) -> None:
    """Prefer no more shared memory than the kernel needs, from its second launch on: the rest is the L1 cache's.

    Triton prefers all that there is, and of 256 KiB leaves the cache 28.
    """
    carveout = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent of what a multiprocessor can have
    most = getattr(torch.cuda.get_device_properties(), "shared_memory_per_multiprocessor", 228 * 1024)  # an H200's
    percent = min(100, -(-100 * (shared + 1024) // most))  # 1 KiB of each block is the system's
    ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), carveout, percent)


@triton.jit(do_not_specialize=["zero"])
def _sums(
    x,
    w,
    second,
    scale,
    bias,
    codes,
    out,
    positions,
    zero,
    x_step,
    w_step,
    out_step,
    GROUPS: tl.constexpr,
    X_ROWS: tl.constexpr,
    W_ROWS: tl.constexpr,
    TO: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SUMS: tl.constexpr,
    MERGED: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    OUT: tl.constexpr,
    STRIDE: tl.constexpr,
    DILATION: tl.constexpr,
    BIAS: tl.constexpr,
    SECOND: tl.constexpr,
    SCALED: tl.constexpr,
    UNIT: tl.constexpr,
    NEAR: tl.constexpr,
    POSITIONS: tl.constexpr,
    WIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    POOL: tl.constexpr,
):
    C: tl.constexpr = SIZE[2]
    OUTPUTS: tl.constexpr = OUT[2]
    LENGTH: tl.constexpr = WINDOW[0] * WINDOW[1] * C
    STEPS: tl.constexpr = (LENGTH + DEPTH - 1) // DEPTH
    BLOCKS: tl.constexpr = (OUTPUTS + WIDE - 1) // WIDE
    KIND: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32

    # groups first: programs that read the same x run at the same time
    program = tl.program_id(0)
    group = program % len(GROUPS)
    channel = program // len(GROUPS) % BLOCKS * WIDE + tl.arange(0, WIDE)
    place = program // (len(GROUPS) * BLOCKS) * POSITIONS + tl.arange(0, POSITIONS)
    rows = ()
    for s in tl.static_range(len(GROUPS[0])):
        row = group * 0 + GROUPS[0][s]
        for g in tl.static_range(1, len(GROUPS)):
            row = tl.where(group == g, GROUPS[g][s], row)
        rows = rows + (row.to(tl.int64),)

    inside = tl.minimum(place, positions - 1)  # reads what is there, and is not written
    if POOL:
        # rows r and r + 8 of a product are the same thread's, r and r + 4 those of two lanes: see kept
        at = tl.arange(0, POSITIONS)
        window = program // (len(GROUPS) * BLOCKS) * (POSITIONS // 4) + at // 16 * 4 + at % 4
        number = at // 8 % 2 + at // 4 % 2 * 2
        corner = corners(tl.minimum(window, positions // 4 - 1), number, SIZE, OUT, STRIDE)
    else:
        image = inside // (OUT[0] * OUT[1])
        top = inside // OUT[1] % OUT[0] * STRIDE[0]
        left = inside % OUT[1] * STRIDE[1]
        corner = ((image * SIZE[0] + top) * SIZE[1] + left) * C
    if NEAR > 0:
        # Copies of 16 bytes go past the L1 cache, those of 8 through it. What is not known to be zero makes them 8.
        corner = corner + NEAR * zero

    sums = ()
    for _ in tl.static_range(len(SUMS) + len(MERGED)):
        sums = sums + (tl.zeros((POSITIONS, WIDE), KIND),)
    for p in tl.static_range(len(TO)):
        for step in range(STEPS):
            k = step * DEPTH + tl.arange(0, DEPTH)
            xs = ()
            ws = ()
            for s in tl.static_range(len(X_ROWS[p])):
                line = x + rows[X_ROWS[p][s]] * x_step * UNIT
                part = numbers(line, corner, k, SIZE, WINDOW, DILATION, LENGTH, False, True)
                xs = xs + (part,)
            for s in tl.static_range(len(W_ROWS[p])):
                ws = ws + (weights(w + rows[W_ROWS[p][s]] * w_step * UNIT, channel, k, OUTPUTS, LENGTH),)
            for t in tl.static_range(len(TO[p])):
                one, other = xs[LEFT[p][t]], ws[RIGHT[p][t]].T
                more = tl.dot(one, other, sums[TO[p][t]], input_precision="ieee", out_dtype=KIND)
                sums = _put(sums, TO[p][t], more)

    for m in tl.static_range(len(MERGED)):
        sums = _put(sums, MERGED[m][0], sums[MERGED[m][0]] + sums[MERGED[m][1]])
    for n in tl.static_range(len(SUMS)):
        i = rows[SUMS[n][0]]
        j = rows[SUMS[n][1]]
        total = sums[n] * tl.where((i == j) & (i > 0), 2.0, 1.0).to(KIND)
        if SCALED:
            total = _times(total, tl.load(scale + i), tl.load(scale + ROWS + j))
        sums = _put(sums, n, total)
    if SECOND:
        for first in tl.static_range(0, len(SUMS), 2):  # two at a time: more would not stay in registers
            if SCALED:
                for n in tl.static_range(first, min(first + 2, len(SUMS))):
                    of_pair, of_value = _scales_of_pair(scale, rows[SUMS[n][0]], rows[SUMS[n][1]], ROWS)
                    sums = _put(sums, n, _times(sums[n], 1 / of_pair, 1 / of_value))
            for step in range(STEPS):
                k = step * DEPTH + tl.arange(0, DEPTH)
                value = weights(w, channel, k, OUTPUTS, LENGTH)
                for n in tl.static_range(first, min(first + 2, len(SUMS))):
                    i = rows[SUMS[n][0]] - 1
                    j = rows[SUMS[n][1]] - 1
                    line = second + tl.maximum(_number(i, j, ROWS - 1), 0) * x_step * UNIT
                    pair = numbers(line, corner, k, SIZE, WINDOW, DILATION, LENGTH, False, i >= 0)
                    more = tl.dot(pair, value.T, sums[n], input_precision="ieee", out_dtype=KIND)
                    sums = _put(sums, n, more)
            if SCALED:
                for n in tl.static_range(first, min(first + 2, len(SUMS))):
                    of_pair, of_value = _scales_of_pair(scale, rows[SUMS[n][0]], rows[SUMS[n][1]], ROWS)
                    sums = _put(sums, n, _times(sums[n], of_pair, of_value))

    if POOL:
        place = program // (len(GROUPS) * BLOCKS) * (POSITIONS // 4) + tl.arange(0, POSITIONS // 4)
        positions = positions // 4
    there = (place < positions)[:, None] & (channel < OUTPUTS)[None, :]
    at = (place * OUTPUTS)[:, None] + channel[None, :]
    if POOL:
        code = tl.load(codes + at, mask=there, other=OFF).to(tl.int32)
    for n in tl.static_range(len(SUMS)):
        i = rows[SUMS[n][0]]
        j = rows[SUMS[n][1]]
        total = sums[n]
        if BIAS:
            more = tl.load(bias + j * OUTPUTS + channel, mask=(channel < OUTPUTS) & (i == 0), other=0.0)
            total = total + more.to(KIND)[None, :]
        if POOL:
            total = kept(total, code)
        tl.store(out + _number(i, j, ROWS) * out_step + at, total.to(out.dtype.element_ty), mask=there)


OFF = tl.constexpr(4)  # the code of a window none of whose four positions is kept


@triton.jit
def corners(window, number, SIZE: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr):
    """Where the numbers of position ``number`` (0 to 3) of pooled windows begin; OUT is the shape after pooling."""
    image = window // (OUT[0] * OUT[1])
    top = (window // OUT[1] % OUT[0] * 2 + number // 2) * STRIDE[0]
    left = (window % OUT[1] * 2 + number % 2) * STRIDE[1]
    return ((image * SIZE[0] + top) * SIZE[1] + left) * SIZE[2]


@triton.jit
def kept(total, code):
    """Of the four positions of each window the one that its code names, or zero: (windows, channels)."""
    four = tl.reshape(total, (code.shape[0] // 4, 2, 2, 4, code.shape[1]))
    number = tl.arange(0, 2)[None, :, None, None, None] + tl.arange(0, 2)[None, None, :, None, None] * 2
    code = tl.reshape(code, (code.shape[0] // 4, 4, code.shape[1]))
    one = tl.sum(tl.sum(tl.where(code[:, None, None, :, :] == number, four, 0.0), axis=1), axis=1)
    return tl.reshape(one, (total.shape[0] // 4, total.shape[1]))


@triton.jit
def numbers(
    line,
    corner,
    k,
    SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    DILATION: tl.constexpr,
    LENGTH: tl.constexpr,
    ROUND: tl.constexpr,
    there,
):
    """Numbers k of the windows at ``corner``, (positions, depth), rounded to TF32 where ROUND says so."""
    RUN: tl.constexpr = WINDOW[1] * SIZE[2]
    down = k // RUN * DILATION[0]
    if DILATION[1] == 1:
        offset = down * (SIZE[1] * SIZE[2]) + k % RUN
    else:
        offset = (down * SIZE[1] + k % RUN // SIZE[2] * DILATION[1]) * SIZE[2] + k % SIZE[2]
    mask = ((k < LENGTH) & there)[None, :]
    numbers = tl.load(line + corner[:, None] + offset[None, :], mask=mask, other=0.0)
    if ROUND:
        # to the nearest number of 11 bits; the matrix unit itself would cut off, and make every product smaller.
        # What is done to it in registers also keeps it there, which spares shared memory one of two reads
        high = numbers * 8193.0
        numbers = high - (high - numbers)
    return numbers


@triton.jit
def weights(line, channel, k, OUTPUTS: tl.constexpr, LENGTH: tl.constexpr):
    """Numbers k of the kernels of each channel, (channels, depth)."""
    mask = (channel < OUTPUTS)[:, None] & (k < LENGTH)[None, :]
    return tl.load(line + (channel * LENGTH)[:, None] + k[None, :], mask=mask, other=0.0)


@triton.jit
def _number(i, j, COUNT: tl.constexpr):
    """The place of the pair i <= j among all pairs of COUNT rows."""
    return i * COUNT - i * (i - 1) // 2 + j - i


@triton.jit
def _times(total, one, other):
    """The sum with two scales, the smaller one first: the product of both, or with the larger, may be out of range."""
    return total * tl.minimum(one, other) * tl.maximum(one, other)


@triton.jit
def _scales_of_pair(scale, i, j, ROWS: tl.constexpr):
    """The scales of the second row (i, j) of x and of the value of w, or 1 where there is no such row."""
    at = 2 * ROWS + tl.maximum(_number(i - 1, j - 1, ROWS - 1), 0)
    return tl.load(scale + at, mask=i > 0, other=1.0), tl.load(scale + ROWS, mask=i > 0, other=1.0)


@triton.jit
def _put(values, INDEX: tl.constexpr, value):
    """The tuple with one entry replaced."""
    new = ()
    for n in tl.static_range(len(values)):
        new = new + (value if n == INDEX else values[n],)
    return new
