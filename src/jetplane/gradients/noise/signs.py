"""The random tangents: signs from a counter, a function of (seed, step, site, row, element) alone.

Signs and not Gaussian numbers: both have zero mean and unit covariance, but the variance of (u . g) u_i is
|g|^2 + (kurtosis - 2) g_i^2, and signs have the smallest kurtosis that there is, 1 against 3. They also take one bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ...directions.counter import Words, philox
from ...directions.traced import fast

__all__ = ["Noise", "Signs"]

_MASK = 0xFFFFFFFF
_SMALL = 1 << 15  # bytes that are kept from one pass to the other, where drawing is most of the work
_OWN = 1 << 31  # tells these numbers from the directions of an optimizer with the same seed and step


class Noise(Protocol):
    """Tangents of zero mean and unit covariance."""

    def rows(self, site: int, start: int, stop: int, like: Tensor) -> Tensor:
        """Rows start to stop - 1 for the activation ``like`` of a site, (stop - start, *S): equal whenever asked."""
        ...


@dataclass(frozen=True)
class Signs:
    """+1 or -1 with equal chances, independent for all entries.

    Example:
        >>> x = torch.zeros(3, 50)
        >>> rows = Signs(0, 7).rows(2, 0, 4, x)
        >>> assert torch.equal(rows.abs(), torch.ones(4, 3, 50))
        >>> assert torch.equal(rows[1:3], Signs(0, 7).rows(2, 1, 3, x))
    """

    seed: int | Tensor
    step: int | Tensor  # an int64 tensor () where a graph is to advance it
    _drawn: dict[Any, Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # bits, for small ones

    def rows(self, site: int, start: int, stop: int, like: Tensor) -> Tensor:
        from . import traced  # which has its operations made of this module's arithmetic

        if isinstance(self.seed, Tensor) or fast(like.device):
            return traced.rows(self.seed, self.step, site | _OWN, start, stop, like)
        return self.part(site, start, stop, like, 0)

    def part(self, site: int, start: int, stop: int, like: Tensor, first: int | Tensor) -> Tensor:
        """The same of ``like`` as a part of a longer row, of which ``first`` elements come before it."""
        if isinstance(first, Tensor) or isinstance(self.seed, Tensor) or fast(like.device):
            from . import traced

            return traced.rows(self.seed, self.step, site | _OWN, start, stop, like, first)
        count, end = stop - start, first + like.numel()
        block, rest = divmod(first, 128)
        octets = self._octets(site | _OWN, start, stop, block, end, like.device)
        return _of_octets(octets, count, end - 128 * block, like.dtype)[:, rest:].reshape(count, *like.shape)

    def _octets(self, place: int, start: int, stop: int, block: int, size: int, device: torch.device) -> Tensor:
        """The second pass finds those of small layers where the first has left them."""
        key = place, start, stop, block, size, device
        octets = self._drawn.pop(key, None)
        if octets is None:
            assert not isinstance(self.seed, Tensor)
            octets = _drawn(self.seed, self.step, place, start, stop, size, device, block)
            if octets.nbytes + sum(drawn.nbytes for drawn in self._drawn.values()) <= _SMALL:
                self._drawn[key] = octets
        return octets


def counted(
    seed: int, step: int | Tensor, place: int, start: int, stop: int, size: int, dtype: torch.dtype, first: int = 0
) -> Tensor:
    """Rows start to stop - 1 of the signs at a place, (stop - start, size), by the counter's arithmetic.

    They are those behind the ``first`` of longer rows.
    """
    device = step.device if isinstance(step, Tensor) else torch.device("cpu")
    block, rest = divmod(first, 128)
    octets = _drawn(seed, step, place, start, stop, first + size, device, block)
    return _of_octets(octets, stop - start, rest + size, dtype)[:, rest:]


def _of_octets(octets: Tensor, count: int, size: int, dtype: torch.dtype) -> Tensor:
    """For each byte its eight signs, lowest bit first."""
    signs = _table(dtype, octets.device).index_select(0, octets.to(torch.int32))
    return signs.reshape(count, -1)[:, :size]


def _drawn(
    seed: int, step: int | Tensor, place: int, start: int, stop: int, size: int, device: torch.device, block: int = 0
) -> Tensor:
    """The four bytes of each word, from a block of 128 signs on."""
    words = torch.stack(_words(seed, step, place, start, stop, block, -(-size // 128), device), -1)
    return words.to(torch.int32).view(torch.uint8).flatten()


def _words(
    seed: int, step: int | Tensor, place: int, start: int, stop: int, block: int, blocks: int, device: torch.device
) -> Words:
    columns = torch.arange(block, blocks, dtype=torch.int64, device=device).unsqueeze(0)
    rows = torch.arange(start, stop, dtype=torch.int64, device=device).unsqueeze(1)
    marks = [
        word.reshape(1, 1) if isinstance(word, Tensor) else torch.full((1, 1), word, dtype=torch.int64, device=device)
        for word in (place, step)
    ]
    return philox([columns, rows, *marks], (seed & _MASK, seed >> 32 & _MASK))


@cache
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """(256, 8): the signs of the bits of a byte."""
    bits = torch.arange(256, device="cpu").unsqueeze(1) >> torch.arange(8, device="cpu") & 1
    return (1 - 2 * bits).to(device, dtype)
