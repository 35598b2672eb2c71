"""Signs on CUDA in one launch: the Triton twin of :mod:`jetplane.gradients.noise.signs`, equal bit by bit.

Under Triton's interpreter (TRITON_INTERPRET=1) the kernel runs on a CPU, too.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...directions.kernels import _philox

__all__ = ["signs"]

_COUNTERS = 16  # of one program; each makes 128 signs


def signs(
    seed: Tensor,
    step: Tensor,
    first: Tensor | None,
    place: int,
    start: int,
    stop: int,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """+1 or -1, (stop - start, size), one bit each; seed, step and first are int64 tensors ().

    They are those behind the ``first`` of longer rows.
    """
    out = torch.empty((stop - start, size), dtype=dtype, device=step.device)
    if out.numel():
        # what comes before may end within a counter's 128, so that one more is begun at the end
        counters = triton.cdiv(size, 128) + (first is not None)
        grid = triton.cdiv(counters, _COUNTERS), stop - start
        _fill[grid](out, seed, step, seed if first is None else first, place, start, size, first is not None, _COUNTERS)
    return out


@triton.jit
def _fill(out, seed, step, first, place, start, size, IS_PART: tl.constexpr, COUNTERS: tl.constexpr):
    row = tl.program_id(1)
    local = tl.program_id(0) * COUNTERS + tl.arange(0, COUNTERS)
    counter, before = local.to(tl.int64), 0
    if IS_PART:
        number = tl.load(first)
        counter += number // 128
        before = (number % 128).to(tl.int32)
    key = tl.load(seed)
    zero = tl.zeros((COUNTERS,), tl.uint32)
    c1 = (tl.zeros((COUNTERS,), tl.int64) + row + start).to(tl.uint32)
    c2 = (tl.zeros((COUNTERS,), tl.int64) + place).to(tl.uint32)
    c3 = zero + tl.load(step).to(tl.uint32)
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = _philox(counter.to(tl.uint32), c1, c2, c3, zero + k0, zero + k1)
    line = out + row.to(tl.int64) * size
    _store(line, local, w0, 0 - before, size)
    _store(line, local, w1, 32 - before, size)
    _store(line, local, w2, 64 - before, size)
    _store(line, local, w3, 96 - before, size)


@triton.jit
def _store(line, counter, word, first, size):
    bit = tl.arange(0, 32)
    place = counter[:, None] * 128 + first + bit[None, :]
    sign = 1.0 - 2.0 * ((word[:, None] >> bit[None, :].to(tl.uint32)) & 1).to(tl.float32)
    tl.store(line + place, sign.to(line.dtype.element_ty), mask=(place >= 0) & (place < size))
