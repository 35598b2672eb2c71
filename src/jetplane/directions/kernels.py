"""Normal numbers on CUDA in one launch, and sums of them: the Triton twin of :mod:`jetplane.directions.counter` and
:mod:`jetplane.directions.weighed`, equal bit by bit.

Every operation is rounded by itself, as in the twin: the compiler must not fuse a product and a sum (the option
``enable_fp_fusion``), and division and square root are the correctly rounded ones. Under Triton's interpreter
(TRITON_INTERPRET=1) the kernels run on a CPU, too.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .counter import COS, LOG, SIN

__all__ = ["along", "in_order", "normal"]

_COUNTERS = 256  # of one program
_FEW_COUNTERS = 64  # of one that takes many steps: more programs, for each of them takes long
_ENTRIES = 1024  # of a sum, of one program

L0, L1, L2, L3 = (tl.constexpr(c) for c in LOG[torch.float32])
S0, S1, S2 = (tl.constexpr(c) for c in SIN[torch.float32])
C0, C1, C2, C3 = (tl.constexpr(c) for c in COS[torch.float32])
WL0, WL1, WL2, WL3, WL4, WL5, WL6 = (tl.constexpr(c) for c in LOG[torch.float64])
WS0, WS1, WS2, WS3, WS4, WS5 = (tl.constexpr(c) for c in SIN[torch.float64])
WC0, WC1, WC2, WC3, WC4, WC5, WC6 = (tl.constexpr(c) for c in COS[torch.float64])
LN2 = tl.constexpr(math.log(2.0))
TURN, WIDE_TURN = tl.constexpr(math.pi / 2 * 2.0**-30), tl.constexpr(math.pi / 2 * 2.0**-53)


def normal(seed: Tensor, step: Tensor, place: int, start: int, stop: int, size: int, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers (stop - start, size), as counter.normal's; ``place`` is position + 2^16 sample."""
    out = torch.empty((stop - start, size), dtype=dtype, device=step.device)
    wide = dtype == torch.float64
    blocks = triton.cdiv(size, 2 if wide else 4)
    grid = (triton.cdiv(blocks, _COUNTERS), stop - start)
    if out.numel():
        _fill[grid](out, seed, step, place, start, size, wide, _COUNTERS, enable_fp_fusion=False)
    return out


def in_order(coefficients: Tensor, rows: Tensor) -> Tensor:
    """sum_k c_k v_k for coefficients (K,) and rows (K, n), as weighed.in_order's."""
    rows, count = rows.contiguous(), rows.shape[1]
    out = torch.empty(count, dtype=rows.dtype, device=rows.device)
    if count:
        numbers, wide = coefficients.contiguous(), rows.dtype == torch.float64
        _sum[(triton.cdiv(count, _ENTRIES),)](
            out, numbers, rows, count, rows.shape[0], wide, _ENTRIES, enable_fp_fusion=False
        )
    return out


def along(leaf: Tensor, words: Tensor, position: int, numbers: Tensor) -> None:
    """Move a leaf (n,) by several steps, as weighed.along does; words are (1 + S,): seed and steps, numbers (S, K + 1):
    shares and the factor of each step."""
    wide = leaf.dtype == torch.float64
    blocks = triton.cdiv(leaf.numel(), 2 if wide else 4)
    steps, columns = numbers.shape
    if leaf.numel():
        grid = (triton.cdiv(blocks, _FEW_COUNTERS),)
        _along[grid](
            *(leaf, words, numbers, position, leaf.numel(), steps, columns - 1, wide, _FEW_COUNTERS),
            num_warps=2,
            enable_fp_fusion=False,
        )


@triton.jit
def _sum(out, numbers, rows, size, COUNT: tl.constexpr, WIDE: tl.constexpr, ENTRIES: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    mask = place < size
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    total = tl.full((ENTRIES,), -0.0, kind)  # which leaves the sign of a zero
    for row in range(COUNT):
        number = tl.load(numbers + row).to(kind)
        total += tl.load(rows + row * size + place, mask=mask, other=0.0).to(kind) * number
    tl.store(out + place, total, mask=mask)


@triton.jit
def _along(leaf, words, numbers, place, size, steps, K: tl.constexpr, WIDE: tl.constexpr, COUNTERS: tl.constexpr):
    counter = tl.program_id(0) * COUNTERS + tl.arange(0, COUNTERS)
    key = tl.load(words)
    zero = tl.zeros((COUNTERS,), tl.uint32)
    k0 = zero + (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = zero + ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0 = counter.to(tl.uint32)
    c2 = (tl.zeros((COUNTERS,), tl.int64) + place).to(tl.uint32)
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    per: tl.constexpr = 2 if WIDE else 4
    first = counter.to(tl.int64) * per
    at0 = tl.load(leaf + first, mask=first < size, other=0.0)
    at1 = tl.load(leaf + first + 1, mask=first + 1 < size, other=0.0)
    at2, at3 = at0, at1
    if not WIDE:
        at2 = tl.load(leaf + first + 2, mask=first + 2 < size, other=0.0)
        at3 = tl.load(leaf + first + 3, mask=first + 3 < size, other=0.0)
    step = 0
    while step < steps:  # the interpreter cannot count to a number that is no constant
        c3 = zero + tl.load(words + 1 + step).to(tl.uint32)
        line = numbers + step * (K + 1)
        d0 = tl.full((COUNTERS,), -0.0, kind)
        d1, d2, d3 = d0, d0, d0
        for row in range(K):
            share = tl.load(line + row)
            w0, w1, w2, w3 = _philox(c0, (tl.zeros((COUNTERS,), tl.int64) + row).to(tl.uint32), c2, c3, k0, k1)
            if WIDE:
                a, b = _normal64(w0, w1, w2, w3)
            else:
                a, b = _normal32(w0, w1)
                c, d = _normal32(w2, w3)
                d2 += c * share
                d3 += d * share
            d0 += a * share
            d1 += b * share
        factor = tl.load(line + K)
        at0 = d0 * factor + at0
        at1 = d1 * factor + at1
        if not WIDE:
            at2 = d2 * factor + at2
            at3 = d3 * factor + at3
        step += 1
    tl.store(leaf + first, at0, mask=first < size)
    tl.store(leaf + first + 1, at1, mask=first + 1 < size)
    if not WIDE:
        tl.store(leaf + first + 2, at2, mask=first + 2 < size)
        tl.store(leaf + first + 3, at3, mask=first + 3 < size)


@triton.jit
def _fill(out, seed, step, place, start, size, WIDE: tl.constexpr, COUNTERS: tl.constexpr):
    row = tl.program_id(1)
    counter = tl.program_id(0) * COUNTERS + tl.arange(0, COUNTERS)
    key = tl.load(seed)
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.zeros((COUNTERS,), tl.uint32)
    c0 = counter.to(tl.uint32)
    c1 = (tl.zeros((COUNTERS,), tl.int64) + row + start).to(tl.uint32)
    c2 = (tl.zeros((COUNTERS,), tl.int64) + place).to(tl.uint32)
    c3 = zero + tl.load(step).to(tl.uint32)
    w0, w1, w2, w3 = _philox(c0, c1, c2, c3, zero + k0, zero + k1)
    line = out + row.to(tl.int64) * size
    if WIDE:
        a, b = _normal64(w0, w1, w2, w3)
        first = counter * 2
        tl.store(line + first, a, mask=first < size)
        tl.store(line + first + 1, b, mask=first + 1 < size)
    else:
        a, b = _normal32(w0, w1)
        c, d = _normal32(w2, w3)
        first = counter * 4
        tl.store(line + first, a, mask=first < size)
        tl.store(line + first + 1, b, mask=first + 1 < size)
        tl.store(line + first + 2, c, mask=first + 2 < size)
        tl.store(line + first + 3, d, mask=first + 3 < size)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    m0 = tl.full(c0.shape, 0xD2511F53, tl.uint32)
    m1 = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    w0 = tl.full(c0.shape, 0x9E3779B9, tl.uint32)
    w1 = tl.full(c0.shape, 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        h0 = tl.umulhi(c0, m0)
        l0 = c0 * m0
        h1 = tl.umulhi(c2, m1)
        l1 = c2 * m1
        c0 = h1 ^ c1 ^ k0
        c1 = l1
        c2 = h0 ^ c3 ^ k1
        c3 = l0
        k0 = k0 + w0
        k1 = k1 + w1
    return c0, c1, c2, c3


@triton.jit
def _normal32(radial, angular):
    uniform = (radial.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    bits = uniform.to(tl.int32, bitcast=True) + (0x3F800000 - 0x3F3504F3)
    exponent = ((bits >> 23) - 127).to(tl.float32)
    f = ((bits & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    s = tl.div_rn(f, f + 2.0)
    z = s * s
    rest = (((z * L3 + L2) * z + L1) * z + L0) * z
    logarithm = (f - (f - rest) * s) + exponent * LN2
    radius = tl.sqrt_rn(tl.maximum(logarithm * -2.0, 0.0))
    offset = (((angular & 0x3FFFFFFF).to(tl.int32) - 0x20000000).to(tl.float32) + 0.5) * TURN
    z = offset * offset
    sine = (((z * S2 + S1) * z + S0) * z + 1.0) * offset
    cosine = (((z * C3 + C2) * z + C1) * z + C0) * z + 1.0
    axis = (angular >> 30).to(tl.int32)
    cosine = cosine * (1 - (axis & 2)).to(tl.float32)
    swap = (axis & 1) == 1
    return radius * tl.where(swap, sine, cosine), radius * tl.where(swap, cosine, sine)


@triton.jit
def _normal64(w0, w1, w2, w3):
    bits = (w0.to(tl.int64) << 21) | (w1.to(tl.int64) >> 11)
    uniform = (bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2^-53
    bits = uniform.to(tl.int64, bitcast=True) + (0x3FF0000000000000 - 0x3FE6A09E667F3BCD)
    exponent = ((bits >> 52) - 1023).to(tl.float64)
    f = ((bits & 0xFFFFFFFFFFFFF) + 0x3FE6A09E667F3BCD).to(tl.float64, bitcast=True) - 1.0
    s = f / (f + 2.0)
    z = s * s
    rest = ((((((z * WL6 + WL5) * z + WL4) * z + WL3) * z + WL2) * z + WL1) * z + WL0) * z
    logarithm = (f - (f - rest) * s) + exponent * LN2
    radius = tl.sqrt(tl.maximum(logarithm * -2.0, 0.0))
    angle = ((w2.to(tl.int64) & 0x3FFFFFFF) << 23) | (w3.to(tl.int64) >> 9)
    offset = ((angle - 0x10000000000000).to(tl.float64) + 0.5) * WIDE_TURN
    z = offset * offset
    sine = ((((((z * WS5 + WS4) * z + WS3) * z + WS2) * z + WS1) * z + WS0) * z + 1.0) * offset
    cosine = ((((((z * WC6 + WC5) * z + WC4) * z + WC3) * z + WC2) * z + WC1) * z + WC0) * z + 1.0
    axis = (w2 >> 30).to(tl.int32)
    cosine = cosine * (1 - (axis & 2)).to(tl.float64)
    swap = (axis & 1) == 1
    return radius * tl.where(swap, sine, cosine), radius * tl.where(swap, cosine, sine)
