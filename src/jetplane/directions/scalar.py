"""A few normal numbers in Python's own arithmetic: the same bits as :mod:`jetplane.directions.counter`.

For a handful of numbers the two hundred tensor operations of the counter cost more than a step on a small problem.
Python's integers do not overflow and its floats are rounded as IEEE says, operation by operation, so nothing is lost.
A sum, product, quotient or root of numbers in float32 that is rounded to float64 and then to float32 is what it is
when it is rounded to float32 at once: float64 has more than twice the digits.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .counter import COS, LOG, SIN, Stream

__all__ = ["normal", "pays"]

_FEW = {torch.float64: 48, torch.float32: 32}  # counters up to which this is faster
_PER = {torch.float64: 2, torch.float32: 4}  # numbers of one counter

_MASK = 0xFFFFFFFF
_FLOAT, _INT = struct.Struct("<f"), struct.Struct("<i")


def pays(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are so few numbers, and of this kind."""
    return dtype in _FEW and device.type == "cpu" and rows * -(-size // _PER[dtype]) <= _FEW[dtype]


def normal(stream: Stream, start: int, stop: int, size: int, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers (stop - start, size) in float32 or float64 on the CPU; seed and step are numbers."""
    pairs = _pair if dtype == torch.float64 else _four
    blocks = -(-size // _PER[dtype])
    counters = [number for words in _philox(stream, start, stop, blocks) for number in pairs(*words)]
    made = torch.tensor(counters, dtype=dtype, device="cpu")
    return made.reshape(stop - start, blocks * _PER[dtype])[:, :size].contiguous()


# -- Philox: every counter is a lane of 64 bits of one long integer, with a word of 32 bits in it --------------------


class _Lanes(NamedTuple):
    """The counters (block, row) of all rows, one after the other."""

    lanes: int
    blocks: int
    rows: int
    ones: int  # 1 in each lane: a number times it is the number in each lane
    words: struct.Struct


@lru_cache(maxsize=256)
def _lanes(start: int, stop: int, blocks: int) -> _Lanes:
    count = (stop - start) * blocks
    words = struct.Struct(f"<{count}Q")

    def packed(numbers: list[int]) -> int:
        return int.from_bytes(words.pack(*numbers), "little")

    rows = [row for row in range(start, stop) for _ in range(blocks)]
    return _Lanes(count, packed([*range(blocks)] * (stop - start)), packed(rows), packed([1] * count), words)


@lru_cache(maxsize=256)
def _keys(seed: int, ones: int) -> list[tuple[int, int]]:
    """The keys of Philox's ten rounds, in each lane."""
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
    return [(((k0 + n * 0x9E3779B9) & _MASK) * ones, ((k1 + n * 0xBB67AE85) & _MASK) * ones) for n in range(10)]


def _philox(stream: Stream, start: int, stop: int, blocks: int) -> list[tuple[int, ...]]:
    """Four words for each counter. A product of two words does not leave its lane."""
    count, c0, c1, ones, words = _lanes(start, stop, blocks)
    mask = ones * _MASK
    c2, c3 = ones * (stream.position | stream.sample << 16), ones * int(stream.step)
    for k0, k1 in _keys(int(stream.seed), ones):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32 & mask) ^ c1 ^ k0, p1 & mask, (p0 >> 32 & mask) ^ c3 ^ k1, p0 & mask
    return list(zip(*(words.unpack(c.to_bytes(8 * count, "little")) for c in (c0, c1, c2, c3)), strict=True))


# -- Box and Muller: each line is one of the counter's --------------------------------------------------------------


def _pair(w0: int, w1: int, w2: int, w3: int) -> tuple[float, float]:
    """Two numbers in float64 from four words."""
    f, exponent = math.frexp((float(w0 << 21 | w1 >> 11) + 0.5) * 2.0**-53)
    if f < _ROOT_HALF:
        f, exponent = f + f, exponent - 1
    f -= 1.0
    s = f / (f + 2.0)
    z = s * s
    a0, a1, a2, a3, a4, a5, a6 = _LOG64
    rest = (((((((z * a6 + a5) * z) + a4) * z + a3) * z + a2) * z + a1) * z + a0) * z
    logarithm = (f - (f - rest) * s) + exponent * _LN2_64
    radius = math.sqrt(max(logarithm * -2.0, 0.0))
    angle = (w2 & ((1 << 30) - 1)) << 23 | w3 >> 9
    offset = (float(angle - (1 << 52)) + 0.5) * (math.pi / 2 * 2.0**-53)
    z = offset * offset
    a0, a1, a2, a3, a4, a5 = _SIN64
    sine = radius * (((((((z * a5 + a4) * z + a3) * z + a2) * z + a1) * z + a0) * z + 1.0) * offset)
    a0, a1, a2, a3, a4, a5, a6 = _COS64
    cosine = ((((((z * a6 + a5) * z + a4) * z + a3) * z + a2) * z + a1) * z + a0) * z + 1.0
    cosine = radius * (-cosine if w2 >> 31 else cosine)
    return (sine, cosine) if w2 >> 30 & 1 else (cosine, sine)


def _four(w0: int, w1: int, w2: int, w3: int) -> tuple[float, ...]:
    """Four numbers in float32 from four words."""
    return *_pair32(w0, w1), *_pair32(w2, w3)


def _pair32(radial: int, angular: int) -> tuple[float, float]:
    r = _single
    uniform = r(r(float(radial)) + 0.5) * 2.0**-32
    bits = _INT.unpack(_FLOAT.pack(uniform))[0] + (_ONE32 - _HALF32)
    exponent = float((bits >> 23) - (_ONE32 >> 23))
    f = _FLOAT.unpack(_INT.pack((bits & ((1 << 23) - 1)) + _HALF32))[0] - 1.0
    s = r(f / r(f + 2.0))
    z = r(s * s)
    rest = r(_polynomial32(z, _LOG32) * z)
    logarithm = r(r(f - r(r(f - rest) * s)) + r(exponent * _LN2))
    radius = r(math.sqrt(max(logarithm * -2.0, 0.0)))  # in this order: -0.0 as there
    offset = r(r(r(float((angular & ((1 << 30) - 1)) - (1 << 29))) + 0.5) * _QUARTER)
    z = r(offset * offset)
    sine = r(r(r(_polynomial32(z, _SIN32) * z) + 1.0) * offset)
    cosine = r(r(_polynomial32(z, _COS32) * z) + 1.0) * (1 - (angular >> 30 & 2))
    return (r(radius * sine), r(radius * cosine)) if angular >> 30 & 1 else (r(radius * cosine), r(radius * sine))


def _polynomial32(x: float, coefficients: tuple[float, ...]) -> float:
    out = _single(x * coefficients[-1])
    for coefficient in coefficients[-2:0:-1]:
        out = _single(_single(out + coefficient) * x)
    return _single(out + coefficients[0])


def _single(number: float) -> float:
    """The number, rounded to float32."""
    rounded: float = _FLOAT.unpack(_FLOAT.pack(number))[0]
    return rounded


# the bits of 1.0 and of sqrt(1/2)
_ONE32, _HALF32 = 0x3F800000, 0x3F3504F3
_ROOT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
_LOG64, _SIN64, _COS64 = (table[torch.float64] for table in (LOG, SIN, COS))
_LOG32, _SIN32, _COS32 = (tuple(map(_single, table[torch.float32])) for table in (LOG, SIN, COS))
_LN2_64, _LN2, _QUARTER = math.log(2.0), _single(math.log(2.0)), _single(math.pi / 2 * 2.0**-30)
