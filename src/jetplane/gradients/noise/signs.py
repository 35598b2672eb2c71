"""The random tangents: signs from a counter, a function of (seed, step, site, row, element) alone.

Signs and not Gaussian numbers: both have zero mean and unit covariance, but the variance of (u . g) u_i is
|g|^2 + (kurtosis - 2) g_i^2, and signs have the smallest kurtosis that there is, 1 against 3. They also take one bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ...directions.counter import Words, philox
from ...directions.traced import fast

__all__ = ["Noise", "Signs"]

_MASK = 0xFFFFFFFF
_SMALL = 1 << 18  # bytes that are drawn at once and kept for both passes: beyond, the numbers are most of the work
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

    def part(self, site: int, start: int, stop: int, like: Tensor, first: int) -> Tensor:
        """The same of ``like`` as a part of a longer row, of which ``first`` elements come before it."""
        count, end = stop - start, first + like.numel()
        if fast(like.device):
            rows = self.rows(site, start, stop, like.new_empty(()).expand(end))
            return rows[:, first:].reshape(count, *like.shape)
        block, rest = divmod(first, 128)
        octets = self._octets(site | _OWN, start, stop, block, end, like.device)
        return _of_octets(octets, count, end - 128 * block, like.dtype)[:, rest:].reshape(count, *like.shape)

    def ahead(self, sizes: Mapping[int, int], start: int, stop: int, device: torch.device) -> None:
        """Draw rows start to stop - 1 of several sites, of so many elements, at once: by site they are the same.

        A site's numbers are few beside the calls that it takes to draw them. Those of large ones wait for their use.
        """
        if isinstance(self.seed, Tensor) or fast(device):
            return
        wanted, left = [], _SMALL - sum(drawn.nbytes for drawn in self._drawn.values())
        for site, size in sorted(sizes.items(), key=lambda one: one[1]):
            left -= 16 * (stop - start) * -(-size // 128)
            if left < 0:
                break
            wanted.append((site | _OWN, size))
        if len(wanted) > 1:
            found = _drawn_together(self.seed, self.step, wanted, start, stop, device)
            for (place, size), octets in zip(wanted, found, strict=True):
                self._drawn[place, start, stop, 0, size, device] = octets

    def _octets(self, place: int, start: int, stop: int, block: int, size: int, device: torch.device) -> Tensor:
        """Those that were drawn ahead, or are drawn now."""
        octets = self._drawn.get((place, start, stop, block, size, device))
        if octets is None:
            assert not isinstance(self.seed, Tensor)
            octets = _drawn(self.seed, self.step, place, start, stop, size, device, block)
        return octets


def counted(seed: int, step: int | Tensor, place: int, start: int, stop: int, size: int, dtype: torch.dtype) -> Tensor:
    """Rows start to stop - 1 of the signs at a place, (stop - start, size), by the counter's arithmetic."""
    device = step.device if isinstance(step, Tensor) else torch.device("cpu")
    return _of_octets(_drawn(seed, step, place, start, stop, size, device), stop - start, size, dtype)


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


def _drawn_together(
    seed: int, step: int | Tensor, places: Sequence[tuple[int, int]], start: int, stop: int, device: torch.device
) -> list[Tensor]:
    """The same of several places and their sizes, from the first block on."""
    rows = torch.arange(start, stop, dtype=torch.int64, device=device)
    blocks = [-(-size // 128) for _, size in places]
    counts = torch.tensor(blocks, device=device)
    marks = torch.tensor([place for place, _ in places], device=device)
    widest = torch.arange(max(blocks), device=device)
    columns = torch.cat([widest[:count] for count in blocks]).expand(len(rows), -1)
    now = step.reshape(1, 1) if isinstance(step, Tensor) else torch.full((1, 1), step, device=device)
    counter = [columns, rows.unsqueeze(1), marks.repeat_interleave(counts).unsqueeze(0), now]
    words = torch.stack(philox(counter, (seed & _MASK, seed >> 32 & _MASK)), -1)
    return [part.flatten() for part in words.to(torch.int32).view(torch.uint8).split(blocks, 1)]


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
