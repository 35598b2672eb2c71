"""A few normal numbers in Python's own arithmetic: the same bits as :mod:`jetplane.directions.counter`.

For a handful of numbers the two hundred tensor operations of the counter cost more than a step on a small problem.
Python's integers do not overflow and its floats are rounded as IEEE says, operation by operation, so nothing is lost.
A sum, product, quotient or root of numbers in float32 that is rounded to float64 and then to float32 is what it is
when it is rounded to float32 at once: float64 has more than twice the digits.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from .counter import COS, LOG, SIN, Stream

__all__ = ["normal", "pays"]

_FEW = {torch.float64: 48, torch.float32: 32}  # counters up to which this is faster
_PER = {torch.float64: 2, torch.float32: 4}  # numbers of one counter

_MASK = 0xFFFFFFFF
_DOUBLE, _LONG = struct.Struct("<d"), struct.Struct("<q")
_FLOAT, _INT = struct.Struct("<f"), struct.Struct("<i")


def pays(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are so few numbers, and of this kind."""
    return dtype in _FEW and device.type == "cpu" and rows * -(-size // _PER[dtype]) <= _FEW[dtype]


def normal(stream: Stream, start: int, stop: int, size: int, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers (stop - start, size) in float32 or float64 on the CPU; seed and step are numbers."""
    seed, step, place = int(stream.seed), int(stream.step), stream.position | stream.sample << 16
    keys = _keys(seed & _MASK, seed >> 32 & _MASK)
    numbers = _doubles if dtype == torch.float64 else _singles
    rows = []
    for row in range(start, stop):
        made: list[float] = []
        for block in range(-(-size // _PER[dtype])):
            made += numbers(_philox(block, row, place, step, keys), size - len(made))
        rows.append(made)
    return torch.tensor(rows, dtype=dtype, device="cpu").reshape(stop - start, size)


def _keys(k0: int, k1: int) -> list[tuple[int, int]]:
    """The keys of Philox's ten rounds."""
    return [((k0 + n * 0x9E3779B9) & _MASK, (k1 + n * 0xBB67AE85) & _MASK) for n in range(10)]


def _philox(c0: int, c1: int, c2: int, c3: int, keys: list[tuple[int, int]]) -> tuple[int, int, int, int]:
    for k0, k1 in keys:
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
    return c0, c1, c2, c3


# -- Box and Muller: each line is one of the counter's --------------------------------------------------------------


def _doubles(words: tuple[int, int, int, int], wanted: int) -> list[float]:
    """Up to two numbers in float64 from four words."""
    w0, w1, w2, w3 = words
    uniform = (float(w0 << 21 | w1 >> 11) + 0.5) * 2.0**-53
    bits = _LONG.unpack(_DOUBLE.pack(uniform))[0] + (_ONE64 - _HALF64)
    exponent = float((bits >> 52) - (_ONE64 >> 52))
    f = _DOUBLE.unpack(_LONG.pack((bits & ((1 << 52) - 1)) + _HALF64))[0] - 1.0
    s = f / (f + 2.0)
    z = s * s
    rest = _polynomial(z, _LOG64) * z
    logarithm = (f - (f - rest) * s) + exponent * math.log(2.0)
    radius = math.sqrt(max(logarithm * -2.0, 0.0))
    angle = (w2 & ((1 << 30) - 1)) << 23 | w3 >> 9
    offset = (float(angle - (1 << 52)) + 0.5) * (math.pi / 2 * 2.0**-53)
    z = offset * offset
    sine = (_polynomial(z, _SIN64) * z + 1.0) * offset
    cosine = (_polynomial(z, _COS64) * z + 1.0) * (1 - (w2 >> 30 & 2))
    pair = [radius * sine, radius * cosine] if w2 >> 30 & 1 else [radius * cosine, radius * sine]
    return pair[:wanted]


def _singles(words: tuple[int, int, int, int], wanted: int) -> list[float]:
    """Up to four numbers in float32 from four words."""
    made: list[float] = []
    for radial, angular in (words[:2], words[2:]):
        if len(made) < wanted:
            made += _pair32(radial, angular)
    return made[:wanted]


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


def _polynomial(x: float, coefficients: tuple[float, ...]) -> float:
    out = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        out = (out + coefficient) * x
    return out + coefficients[0]


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
_ONE64, _HALF64, _ONE32, _HALF32 = 0x3FF0000000000000, 0x3FE6A09E667F3BCD, 0x3F800000, 0x3F3504F3
_LOG64, _SIN64, _COS64 = (table[torch.float64] for table in (LOG, SIN, COS))
_LOG32, _SIN32, _COS32 = (tuple(map(_single, table[torch.float32])) for table in (LOG, SIN, COS))
_LN2, _QUARTER = _single(math.log(2.0)), _single(math.pi / 2 * 2.0**-30)
