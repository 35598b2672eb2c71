"""Value and tangents of convolution, ReLU and max-pooling from one kernel: for CUDA devices.

With the value as row 0 of x and w and the tangents as rows 1 to K, a tangent of the convolution is

    x_0 * w_j + x_j * w_0        or x_0 * w_j alone, where x is constant

and pooling over windows of 2 x 2 keeps one number of four: that of the largest value, or zero where the largest value
is not positive. Only what is kept is written. Which one it is, is written too, as a code for the second rows: 0 to 3 is
the place in the window, and OFF none.

A program has 32 windows, four positions each, and one block of channels. It finds the codes of its windows with the
value, and then goes through the tangents. Rows of the product are in such an order that with four warps a thread has
all four positions of a window, and picks one of them without asking others: rows r, r + 8, r + 64 and r + 72.

Under Triton's interpreter (TRITON_INTERPRET=1) the kernel runs on a CPU, too.
"""

# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .convolution_triton import OFF, corners, numbers, weights

__all__ = ["Tile", "constants", "pooled_rows"]


@dataclass(frozen=True)
class Tile:
    """How a program works; what it computes does not depend on it."""

    depth: int = 32  # numbers of a window that are read at a time
    warps: int = 4
    stages: int = 3


_TILE = Tile()
_WINDOWS = 32  # of a program


def pooled_rows(
    x: Tensor,  # (1 or T, N, H, W, C)
    w: Tensor,  # (T, O, height, width, C)
    bias: Tensor | None,  # (T, O)
    stride: Sequence[int],
    dilation: Sequence[int],
    shape: tuple[int, int, int, int],  # (N, PH, PW, O), pooled
    tf32: bool,
    tile: Tile = _TILE,
) -> tuple[Tensor, Tensor, Tensor]:
    """Value (N, PH, PW, O), rows (T, N, PH, PW, O), the value among them, and codes. All tensors are contiguous."""
    rows = w.shape[0]
    value, out = x.new_empty(shape), x.new_empty((rows, *shape))
    codes = x.new_empty(shape, dtype=torch.uint8)
    windows = shape[0] * shape[1] * shape[2]
    if not out.numel():
        return value, out, codes
    fixed = constants(x, w, bias, stride, dilation, shape, tf32, tile)
    _pooled[triton.cdiv(windows, _WINDOWS), triton.cdiv(shape[3], fixed["WIDE"])](
        x,
        w,
        w if bias is None else bias,
        value,
        out,
        codes,
        windows,
        x[0].numel(),
        w[0].numel(),
        out[0].numel(),
        **fixed,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return value, out, codes


def constants(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    dilation: Sequence[int],
    shape: tuple[int, int, int, int],
    tf32: bool,
    tile: Tile,
) -> dict[str, Any]:
    """What the kernel is compiled for."""
    rounds = tf32 and x.dtype == torch.float32
    return {
        "TANGENTS": x.shape[0] > 1,
        "ROWS": w.shape[0],
        "SIZE": tuple(x.shape[2:]),
        "WINDOW": tuple(w.shape[2:4]),
        "OUT": tuple(shape[1:]),
        "STRIDE": tuple(stride),
        "DILATION": tuple(dilation),
        "BIAS": bias is not None,
        "ROUND": rounds,
        "PRECISION": "tf32" if rounds else "ieee",
        "WIDE": _wide(shape[3]),
        "DEPTH": tile.depth,
    }


def _wide(channels: int) -> int:
    """Channels of one program."""
    return min(64, max(16, triton.next_power_of_2(channels)))


@triton.jit
def _pooled(
    x,
    w,
    bias,
    value,
    out,
    codes,
    windows,
    x_step,
    w_step,
    out_step,
    TANGENTS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    OUT: tl.constexpr,
    STRIDE: tl.constexpr,
    DILATION: tl.constexpr,
    BIAS: tl.constexpr,
    ROUND: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    C: tl.constexpr = SIZE[2]
    OUTPUTS: tl.constexpr = OUT[2]
    LENGTH: tl.constexpr = WINDOW[0] * WINDOW[1] * C
    KIND: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32

    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    place = tl.arange(0, 128)
    window = tl.program_id(0) * 32 + place // 16 % 4 * 8 + place % 8
    corner = corners(tl.minimum(window, windows - 1), place // 64 * 2 + place // 8 % 2, SIZE, OUT, STRIDE)
    window = tl.program_id(0) * 32 + tl.arange(0, 32)
    there = (window < windows)[:, None] & (channel < OUTPUTS)[None, :]
    at = (window * OUTPUTS)[:, None] + channel[None, :]

    total = tl.zeros((128, WIDE), KIND)
    total = _added(total, x, w, corner, channel, SIZE, WINDOW, DILATION, OUTPUTS, ROUND, PRECISION, DEPTH)
    if BIAS:
        total = total + tl.load(bias + channel, mask=channel < OUTPUTS, other=0.0).to(KIND)[None, :]

    four = tl.reshape(total, (2, 4, 2, 8, WIDE))
    four = tl.where(four == four, four, float("inf"))  # what is no number is the largest one, as torch has it
    largest = tl.max(tl.max(four, axis=2), axis=0)
    number = tl.where(four == largest[None, :, None, :, :], _numbers(), OFF)
    first = tl.min(tl.min(number, axis=2), axis=0)
    code = tl.where(largest > 0, first, OFF)  # (4, 8, channels)
    tl.store(codes + at, tl.reshape(code, (32, WIDE)).to(tl.uint8), mask=there)
    row = _kept(total, code).to(out.dtype.element_ty)
    tl.store(value + at, row, mask=there)
    tl.store(out + at, row, mask=there)

    if ROWS > 1:
        x_line, w_line, bias_line, out_line = x, w, bias, out
        if LENGTH <= DEPTH:  # the same numbers for all rows
            k = tl.arange(0, DEPTH)
            part = numbers(x, corner, k, SIZE, WINDOW, DILATION, LENGTH, ROUND, True)
        for _ in range(1, ROWS):
            x_line, w_line, bias_line, out_line = (
                x_line + x_step,
                w_line + w_step,
                bias_line + OUTPUTS,
                out_line + out_step,
            )
            total = tl.zeros((128, WIDE), KIND)
            if LENGTH <= DEPTH:
                kernel = weights(w_line, channel, k, OUTPUTS, LENGTH)
                total = tl.dot(part, kernel.T, total, input_precision=PRECISION, out_dtype=KIND)
            else:
                total = _added(
                    total, x, w_line, corner, channel, SIZE, WINDOW, DILATION, OUTPUTS, ROUND, PRECISION, DEPTH
                )
            if TANGENTS:
                total = _added(
                    total, x_line, w, corner, channel, SIZE, WINDOW, DILATION, OUTPUTS, ROUND, PRECISION, DEPTH
                )
            if BIAS:
                total = total + tl.load(bias_line + channel, mask=channel < OUTPUTS, other=0.0).to(KIND)[None, :]
            tl.store(out_line + at, _kept(total, code).to(out.dtype.element_ty), mask=there)


@triton.jit
def _numbers():
    """The place in its window of each row of a product that is taken apart into (2, 4, 2, 8, channels)."""
    return tl.arange(0, 2)[:, None, None, None, None] * 2 + tl.arange(0, 2)[None, None, :, None, None]


@triton.jit
def _kept(total, code):
    """Of the four positions of each window the one that its code names, or zero: (windows, channels)."""
    four = tl.reshape(total, (2, 4, 2, 8, code.shape[2]))
    four = tl.where(code[None, :, None, :, :] == _numbers(), four, 0.0)
    return tl.reshape(tl.sum(tl.sum(four, axis=2), axis=0), (32, code.shape[2]))


@triton.jit
def _added(
    total,
    x,
    w,
    corner,
    channel,
    SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    DILATION: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROUND: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The sum with the products of one row of x and one of w added."""
    LENGTH: tl.constexpr = WINDOW[0] * WINDOW[1] * SIZE[2]
    STEPS: tl.constexpr = (LENGTH + DEPTH - 1) // DEPTH
    for step in range(STEPS):
        k = step * DEPTH + tl.arange(0, DEPTH)
        part = numbers(x, corner, k, SIZE, WINDOW, DILATION, LENGTH, ROUND, True)
        kernel = weights(w, channel, k, OUTPUTS, LENGTH)
        total = tl.dot(part, kernel.T, total, input_precision=PRECISION, out_dtype=total.dtype)
    return total
