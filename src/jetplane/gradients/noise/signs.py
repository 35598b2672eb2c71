"""The random tangents: signs from a counter, a function of (seed, step, site, row, element) alone.

Signs and not normal numbers: both have zero mean and unit covariance, but the variance of (u . g) u_i is
|g|^2 + (kurtosis - 2) g_i^2, and signs have the smallest kurtosis that there is, 1 against 3. They also take one bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ...directions import traced
from ...directions.counter import Words, philox, signed

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
        return self.part(site, start, stop, like, 0)

    def part(self, site: int, start: int, stop: int, like: Tensor, first: int) -> Tensor:
        """The same of ``like`` as a part of a longer row, of which ``first`` elements come before it."""
        size, count = like.numel(), stop - start
        if traced.fast(like.device):
            launched = self._launched(site, start, stop, first + size, like.dtype, like.device)
            return launched.reshape(count, -1)[:, first:].reshape(count, *like.shape)
        # for each byte its eight signs, lowest bit first
        block, rest = divmod(first, 128)
        octets = self._octets(site, start, stop, block, -(-(first + size) // 128), like.device)
        signs = _table(like.dtype, like.device).index_select(0, octets)
        return signs.reshape(count, -1)[:, rest : rest + size].reshape(count, *like.shape)

    def _octets(self, site: int, start: int, stop: int, block: int, blocks: int, device: torch.device) -> Tensor:
        """The four bytes of each word. The second pass finds those of small layers where the first has left them."""
        key = site, start, stop, block, blocks, device
        octets = self._drawn.pop(key, None)
        if octets is None:
            words = torch.stack(self._words(site, start, stop, block, blocks, device), -1)
            octets = words.to(torch.int32).view(torch.uint8).flatten()
            if octets.nbytes + sum(drawn.nbytes for drawn in self._drawn.values()) <= _SMALL:
                self._drawn[key] = octets
        return octets.to(torch.int32)

    def _launched(
        self, site: int, start: int, stop: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        from . import signs_triton

        seed, step = (
            word if isinstance(word, Tensor) else torch.full((), signed(word), dtype=torch.int64, device=device)
            for word in (self.seed, self.step)
        )
        return signs_triton.signs(seed, step, site | _OWN, start, stop, size, dtype)

    def _words(self, site: int, start: int, stop: int, block: int, blocks: int, device: torch.device) -> Words:
        columns = torch.arange(block, blocks, dtype=torch.int64, device=device).unsqueeze(0)
        rows = torch.arange(start, stop, dtype=torch.int64, device=device).unsqueeze(1)
        place, step = (
            word.reshape(1, 1)
            if isinstance(word, Tensor)
            else torch.full((1, 1), word, dtype=torch.int64, device=device)
            for word in (site | _OWN, self.step)
        )
        return philox([columns, rows, place, step], (self.seed & _MASK, self.seed >> 32 & _MASK))


@cache
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """(256, 8): the signs of the bits of a byte."""
    bits = torch.arange(256, device="cpu").unsqueeze(1) >> torch.arange(8, device="cpu") & 1
    return (1 - 2 * bits).to(device, dtype)
