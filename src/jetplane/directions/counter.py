"""Random numbers without a state: Philox-4x32-10 in integer tensor arithmetic.

Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) maps a counter of four 32-bit words and
a key of two to four random words. Here

    key      seed                                              64 bits
    counter  (block of elements, row, position + 2^16 sample, step)   32 bits each

so that every (seed, step, sample, position, row, element) has its own bits, in any chunking and on any device. They
become uniform and then normal numbers (Box-Muller) by IEEE additions, multiplications, divisions and square roots
only, each of them rounded by itself: a library's log or cos would differ between devices in the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_TILE = 1 << 16  # counters in one go on a CPU: few calls, and a working set that stays in its cache

Words = tuple[Tensor, Tensor, Tensor, Tensor]


class Stream(NamedTuple):
    """The part of the counter that all rows and elements of one tensor share.

    Seed and step may be int64 tensors (), in a traced program that is to run with other ones.
    """

    seed: int | Tensor  # 64 bits
    step: int | Tensor  # 32 bits
    sample: int  # 16 bits
    position: int  # 16 bits


def philox(counter: Sequence[Tensor], key: tuple[int | Tensor, int | Tensor]) -> Words:
    """Philox-4x32-10 of four int64 tensors of 32-bit words, which may broadcast against each other.

    One round with the multipliers M and the key k, where hi and lo are the halves of a 64-bit product:

        (c0, c1, c2, c3) <- (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0))

    Example:
        >>> zero = torch.zeros((), dtype=torch.int64)
        >>> [f"{int(word):08x}" for word in philox([zero] * 4, (0, 0))]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    halves = _halves_in_steps if isinstance(k0, Tensor) else _halves
    for _ in range(10):
        h0, l0 = halves(c0, _MULTIPLIERS[0])
        h1, l1 = halves(c2, _MULTIPLIERS[1])
        c0, c1 = _xor(h1.bitwise_xor_(k0), c1), l1
        c2, c3 = _xor(h0.bitwise_xor_(k1), c3), l0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _halves(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of the product of two words."""
    product = word * multiplier  # wraps around 2^64, which keeps all bits
    return (product >> 32).bitwise_and_(_MASK), product.bitwise_and_(_MASK)  # the shift drags the sign along


def _halves_in_steps(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The same without overflow: to a C++ compiler that is undefined, and it draws false conclusions from it."""
    low = (word & 0xFFFF) * multiplier
    high = (word >> 16) * multiplier + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def _xor(fresh: Tensor, other: Tensor) -> Tensor:
    """fresh ^ other, in place where the shapes allow it."""
    return fresh.bitwise_xor_(other) if fresh.shape == other.shape else fresh ^ other


def signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word.

    Example:
        >>> signed(2**64 - 1), signed(5)
        (-1, 5)
    """
    return word - (1 << 64) if word >= 1 << 63 else word


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: short dtypes are rounded from it."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def normal(stream: Stream, start: int, stop: int, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal numbers (stop - start, size) in float32 or float64."""
    per = 2 if dtype == torch.float64 else 4
    out = torch.empty((stop - start, -(-size // per), per), dtype=dtype, device=device)
    for first, last, words in _tiles(stream, start, stop, out.shape[1], device):
        pairs = _pairs64(words) if dtype == torch.float64 else _pairs32(words)
        for lane, (radius, angle) in enumerate(pairs):
            cosine, sine = _on_circle(angle, dtype)
            torch.mul(radius, cosine, out=out[:, first:last, 2 * lane])
            torch.mul(radius, sine, out=out[:, first:last, 2 * lane + 1])
    return out.flatten(1)[:, :size]


def rademacher(stream: Stream, start: int, stop: int, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers +1 or -1, (stop - start, size): one bit each, 128 to a counter."""
    out = torch.empty((stop - start, -(-size // 128), 4, 32), dtype=dtype, device=device)
    shifts = torch.arange(32, device=device)
    for first, last, words in _tiles(stream, start, stop, out.shape[1], device):
        for lane, word in enumerate(words):
            bits = (word.unsqueeze(-1) >> shifts).bitwise_and_(1)
            out[:, first:last, lane] = bits.mul_(-2).add_(1)
    return out.flatten(1)[:, :size]


def _tiles(
    stream: Stream, start: int, stop: int, blocks: int, device: torch.device
) -> Iterator[tuple[int, int, Words]]:
    """The random words of all rows, a range of blocks at a time: first, last, four words (rows, last - first)."""
    rows = torch.arange(start, stop, dtype=torch.int64, device=device).unsqueeze(1)
    fixed = [
        word.reshape(1, 1) if isinstance(word, Tensor) else torch.full((1, 1), word, dtype=torch.int64, device=device)
        for word in (stream.position | stream.sample << 16, stream.step)
    ]
    key = (stream.seed & _MASK, stream.seed >> 32 & _MASK)
    width = max(1, (_TILE if device.type == "cpu" else 1 << 22) // max(1, stop - start))
    if isinstance(stream.step, Tensor):  # a compiler fuses all of it, so that nothing is gained from tiles
        width = max(1, blocks)
    for first in range(0, blocks, width):
        last = min(first + width, blocks)
        columns = torch.arange(first, last, dtype=torch.int64, device=device).unsqueeze(0)
        yield first, last, philox([columns, rows, *fixed], key)


# -- Box-Muller: sqrt(-2 log u) (cos a, sin a), two normal numbers from two uniform ones ----------------------------

# log((1 + s) / (1 - s)) = 2 s + s R(s^2), and sin and cos on [-pi/4, pi/4]: the polynomials of FreeBSD's msun (Sun's
# fdlibm) and, for sin and cos in float32, of Cephes.
LOG = {
    torch.float32: (0.66666662693, 0.40000972152, 0.28498786688, 0.24279078841),
    torch.float64: (
        6.666666666666735130e-01,
        3.999999999940941908e-01,
        2.857142874366239149e-01,
        2.222219843214978396e-01,
        1.818357216161805012e-01,
        1.531383769920937332e-01,
        1.479819860511658591e-01,
    ),
}
SIN = {
    torch.float32: (-1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4),
    torch.float64: (
        -1.66666666666666324348e-01,
        8.33333333332248946124e-03,
        -1.98412698298579493134e-04,
        2.75573137070700676789e-06,
        -2.50507602534068634195e-08,
        1.58969099521155010221e-10,
    ),
}
COS = {
    torch.float32: (-0.5, 4.166664568298827e-2, -1.388731625493765e-3, 2.443315711809948e-5),
    torch.float64: (
        -0.5,
        4.16666666666666019037e-02,
        -1.38888888888741095749e-03,
        2.48015872894767294178e-05,
        -2.75573143513906633035e-07,
        2.08757232129817482790e-09,
        -1.13596475577881948265e-11,
    ),
}
# How the floats are laid out: integer dtype, bits of the fraction, the bits of 1.0 and those of sqrt(1/2).
_LAYOUT = {
    torch.float32: (torch.int32, 23, 0x3F800000, 0x3F3504F3),
    torch.float64: (torch.int64, 52, 0x3FF0000000000000, 0x3FE6A09E667F3BCD),
}


class _Angle(NamedTuple):
    """An angle: ``offset`` from one of the four axes, in radians within [-pi/4, pi/4]."""

    offset: Tensor
    axis: Tensor  # 0 to 3


def _pairs32(words: Words) -> Iterator[tuple[Tensor, _Angle]]:
    """Two pairs of numbers in float32 from four words: 32 bits for a radius, 2 + 30 for an angle."""
    for radial, angular in (words[:2], words[2:]):
        uniform = radial.to(torch.float32).add_(0.5).mul_(2.0**-32)
        yield _radius(uniform), _angle(angular >> 30, angular.bitwise_and_((1 << 30) - 1), 30, torch.float32)


def _pairs64(words: Words) -> Iterator[tuple[Tensor, _Angle]]:
    """One pair of numbers in float64 from four words: 53 bits for a radius, 2 + 53 for an angle."""
    uniform = (words[0] << 21).bitwise_or_(words[1] >> 11).to(torch.float64).add_(0.5).mul_(2.0**-53)
    axis = words[2] >> 30
    rest = words[2].bitwise_and_((1 << 30) - 1).bitwise_left_shift_(23).bitwise_or_(words[3] >> 9)
    yield _radius(uniform), _angle(axis, rest, 53, torch.float64)


def _angle(axis: Tensor, bits: Tensor, count: int, dtype: torch.dtype) -> _Angle:
    centred = bits.sub_(1 << (count - 1)).to(dtype).add_(0.5)
    return _Angle(centred.mul_(math.pi / 2 * 2.0**-count), axis)


def _radius(uniform: Tensor) -> Tensor:
    """sqrt(-2 log u) for 0 < u <= 1."""
    dtype = uniform.dtype
    integer, fraction, one, root_half = _LAYOUT[dtype]
    # u = 2^e m with m in [sqrt(1/2), sqrt(2)), read from the bits; log u = e log 2 + log m
    bits = uniform.view(integer) + (one - root_half)
    exponent = (bits >> fraction).sub_(one >> fraction).to(dtype)
    f = bits.bitwise_and_((1 << fraction) - 1).add_(root_half).view(dtype).sub_(1.0)
    s = f / (f + 2.0)
    square = s * s
    rest = _polynomial(square, LOG[dtype]).mul_(square)
    logarithm = f.sub_((f - rest).mul_(s)).add_(exponent.mul_(math.log(2.0)))  # log(1 + f) = f - s (f - R)
    return _root(logarithm.mul_(-2.0).clamp_min_(0.0))


def _root(x: Tensor) -> Tensor:
    """The square root, correctly rounded: torch's own differ between devices in the last bit."""
    if x.dtype == torch.float32:
        return x.to(torch.float64).sqrt_().to(torch.float32)
    y = x.sqrt()
    # y^2 = square + error exactly, by splitting y into halves whose products are exact (Dekker, 1971)
    c = y * (2.0**27 + 1)
    high = c - (c - y)
    low = y - high
    square = y * y
    error = (high * high).sub_(square).add_((high * low).mul_(2.0)).add_(low * low)
    residual = (x - square).sub_(error)
    return y.add_(residual.div_((2.0 * y).clamp_min_(2.0**-500)))


def _on_circle(angle: _Angle, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The point (cos, sin) of an angle: +-1 along one axis, the offset along the other."""
    square = angle.offset * angle.offset
    sine = _polynomial(square, SIN[dtype]).mul_(square).add_(1.0).mul_(angle.offset)
    cosine = _polynomial(square, COS[dtype]).mul_(square).add_(1.0)
    cosine.mul_(angle.axis.bitwise_and(2).neg_().add_(1).to(dtype))
    swap = angle.axis.bitwise_and(1).to(torch.bool)
    return torch.where(swap, sine, cosine), torch.where(swap, cosine, sine)


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """a0 + a1 x + a2 x^2 + ... by Horner's rule, one rounding at a time."""
    out = x * coefficients[-1]
    for coefficient in reversed(coefficients[1:-1]):
        out.add_(coefficient).mul_(x)
    return out.add_(coefficients[0])
