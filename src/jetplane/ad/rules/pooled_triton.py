"""Value and tangents of convolution, ReLU and max-pooling from one kernel: for CUDA devices.

With the value as row 0 of x and w and the tangents as rows 1 to K, a tangent of the convolution is

    x_0 * w_j + x_j * w_0        or x_0 * w_j alone, where x is constant

and pooling over windows of 2 x 2 keeps one number of four: that of the largest value, or zero where the largest value
is not positive. Only what is kept is written. Which one it is, is written too, as a code for the second rows: 0 to 3 is
the place in the window, and OFF none.

A program has a tile of windows, four positions each, and one block of channels. It finds the codes of its tile with the
value, and then goes through the tangents.

Under Triton's interpreter (TRITON_INTERPRET=1) the kernel runs on a CPU, too.
"""

# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .convolution_triton import OFF, corners, kept, numbers, weights

__all__ = ["pooled_rows"]

_POSITIONS = 128  # of the output of the convolution: four to a window


def pooled_rows(
    x: Tensor,  # (1 or T, N, H, W, C)
    w: Tensor,  # (T, O, height, width, C)
    bias: Tensor | None,  # (T, O)
    stride: Sequence[int],
    dilation: Sequence[int],
    shape: tuple[int, int, int, int],  # (N, PH, PW, O), pooled
    tf32: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Value (N, PH, PW, O), rows (T, N, PH, PW, O), the value among them, and codes. All tensors are contiguous."""
    rows = w.shape[0]
    value, out = x.new_empty(shape), x.new_empty((rows, *shape))
    codes = x.new_empty(shape, dtype=torch.uint8)
    windows = shape[0] * shape[1] * shape[2]
    if not out.numel():
        return value, out, codes
    rounds = tf32 and x.dtype == torch.float32
    wide = min(64, max(16, triton.next_power_of_2(shape[3])))
    length = w[0, 0].numel()
    _pooled[triton.cdiv(4 * windows, _POSITIONS), triton.cdiv(shape[3], wide)](
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
        TANGENTS=x.shape[0] > 1,
        ROWS=rows,
        SIZE=tuple(x.shape[2:]),
        WINDOW=tuple(w.shape[2:4]),
        OUT=tuple(shape[1:]),
        STRIDE=tuple(stride),
        DILATION=tuple(dilation),
        BIAS=bias is not None,
        ROUND=rounds,
        PRECISION="tf32" if rounds else "ieee",
        POSITIONS=_POSITIONS,
        WIDE=wide,
        DEPTH=32 if length > 16 else 16,
        num_warps=8 if wide == 64 else 4,
        num_stages=3,
    )
    return value, out, codes


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
    POSITIONS: tl.constexpr,
    WIDE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    C: tl.constexpr = SIZE[2]
    OUTPUTS: tl.constexpr = OUT[2]
    LENGTH: tl.constexpr = WINDOW[0] * WINDOW[1] * C
    KIND: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32

    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    place = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    window = place // 4
    corner = corners(tl.minimum(window, windows - 1), place % 4, SIZE, OUT, STRIDE)
    there = (window < windows)[:, None] & (channel < OUTPUTS)[None, :]
    at = (window * OUTPUTS)[:, None] + channel[None, :]

    total = tl.zeros((POSITIONS, WIDE), KIND)
    total = _added(total, x, w, corner, channel, SIZE, WINDOW, DILATION, OUTPUTS, ROUND, PRECISION, DEPTH)
    if BIAS:
        total = total + tl.load(bias + channel, mask=channel < OUTPUTS, other=0.0).to(KIND)[None, :]

    four = tl.reshape(total, (POSITIONS // 4, 4, WIDE))
    four = tl.where(four == four, four, float("inf"))  # what is no number is the largest one, as torch has it
    largest = tl.max(four, axis=1)
    number = tl.arange(0, 4)[None, :, None]
    first = tl.min(tl.where(four == largest[:, None, :], number, OFF), axis=1)
    code = tl.where(largest > 0, first, OFF)
    code = tl.reshape(tl.broadcast_to(code[:, None, :], (POSITIONS // 4, 4, WIDE)), (POSITIONS, WIDE))
    lead = there & (place % 4 == 0)[:, None]
    tl.store(codes + at, code.to(tl.uint8), mask=lead)
    keep = there & kept(code, place)
    total = tl.where(code == OFF, 0.0, total).to(out.dtype.element_ty)
    tl.store(value + at, total, mask=keep)
    tl.store(out + at, total, mask=keep)

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
            total = tl.zeros((POSITIONS, WIDE), KIND)
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
            total = tl.where(code == OFF, 0.0, total).to(out.dtype.element_ty)
            tl.store(out_line + at, total, mask=keep)


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
