"""A few normal numbers in Python's own arithmetic: the same bits as :mod:`jetplane.directions.counter` in float64.

For a handful of numbers the two hundred tensor operations of the counter cost more than a step on a small problem.
Python's integers do not overflow and its floats are rounded as IEEE says, operation by operation, so nothing is lost.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from .counter import COS, LOG, SIN, Stream

__all__ = ["normal", "pays"]

_FEW = 48  # counters up to which this is faster

_MASK = 0xFFFFFFFF
_LOG, _SIN, _COS = LOG[torch.float64], SIN[torch.float64], COS[torch.float64]
_ONE, _ROOT_HALF, _FRACTION = 0x3FF0000000000000, 0x3FE6A09E667F3BCD, 52
_PACK = struct.Struct("<d"), struct.Struct("<q")


def pays(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are so few numbers, and of this kind."""
    return dtype == torch.float64 and device.type == "cpu" and rows * -(-size // 2) <= _FEW


def normal(stream: Stream, start: int, stop: int, size: int) -> Tensor:
    """Standard normal numbers (stop - start, size) in float64 on the CPU; seed and step are numbers."""
    seed, step, place = int(stream.seed), int(stream.step), stream.position | stream.sample << 16
    key = seed & _MASK, seed >> 32 & _MASK
    blocks = -(-size // 2)
    rows = [
        [number for block in range(blocks) for number in _pair(_philox(block, row, place, step, *key))][:size]
        for row in range(start, stop)
    ]
    return torch.tensor(rows, dtype=torch.float64, device="cpu").reshape(stop - start, size)


def _philox(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def _pair(words: tuple[int, int, int, int]) -> tuple[float, float]:
    """Two numbers from four words, by Box and Muller; each line is one of the counter's."""
    w0, w1, w2, w3 = words
    uniform = (float(w0 << 21 | w1 >> 11) + 0.5) * 2.0**-53
    bits = _PACK[1].unpack(_PACK[0].pack(uniform))[0] + (_ONE - _ROOT_HALF)
    exponent = float((bits >> _FRACTION) - (_ONE >> _FRACTION))
    f = _PACK[0].unpack(_PACK[1].pack((bits & ((1 << _FRACTION) - 1)) + _ROOT_HALF))[0] - 1.0
    s = f / (f + 2.0)
    z = s * s
    rest = _polynomial(z, _LOG) * z
    logarithm = (f - (f - rest) * s) + exponent * math.log(2.0)
    radius = math.sqrt(max(logarithm * -2.0, 0.0))
    angle = (w2 & ((1 << 30) - 1)) << 23 | w3 >> 9
    offset = (float(angle - (1 << 52)) + 0.5) * (math.pi / 2 * 2.0**-53)
    z = offset * offset
    sine = (_polynomial(z, _SIN) * z + 1.0) * offset
    cosine = (_polynomial(z, _COS) * z + 1.0) * (1 - (w2 >> 30 & 2))
    return (radius * sine, radius * cosine) if w2 >> 30 & 1 else (radius * cosine, radius * sine)


def _polynomial(x: float, coefficients: tuple[float, ...]) -> float:
    out = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        out = (out + coefficient) * x
    return out + coefficients[0]
