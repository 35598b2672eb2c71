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

from ...directions.counter import philox
from ...directions.traced import fast

__all__ = ["Noise", "Signs"]

_MASK = 0xFFFFFFFF
_SMALL = 1 << 15  # bytes that are drawn at once, and kept from one pass to the other where they are all
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
    _used: set[Any] = field(default_factory=set, init=False, repr=False, compare=False)  # of these, by the first pass
    _coming: dict[Any, list[tuple[int, int]]] = field(default_factory=dict, init=False, repr=False, compare=False)

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

    def ahead(self, sizes: Mapping[int, int], start: int, stop: int, device: torch.device) -> None:
        """Rows start to stop - 1 of these sites, of so many elements, will be asked for in this order.

        A site's numbers are few beside the calls that it takes to draw them, so those of several are drawn at once.
        """
        self._coming[start, stop, device] = [(site | _OWN, size) for site, size in sizes.items()]

    def _octets(self, place: int, start: int, stop: int, block: int, size: int, device: torch.device) -> Tensor:
        """Those that were drawn with an earlier site's, or in the first pass, or are drawn now."""
        key = place, start, stop, block, size, device
        if key not in self._drawn:
            assert not isinstance(self.seed, Tensor)
            wanted = [(place, size)] if block else self._next(place, size, start, stop, device)
            found = _drawn(self.seed, self.step, wanted, start, stop, device, block)
            if sum(octets.nbytes for octets in (*found, *self._drawn.values())) > _SMALL:
                self._drawn.clear()
                self._used.clear()
            if found[0].nbytes > _SMALL:
                return found[0]
            self._used.add(key)
            for (one, count), octets in zip(wanted, found, strict=True):
                self._drawn[one, start, stop, block, count, device] = octets
            return found[0]
        if key in self._used:  # by both passes
            self._used.remove(key)
            return self._drawn.pop(key)
        self._used.add(key)
        return self._drawn[key]

    def _next(self, place: int, size: int, start: int, stop: int, device: torch.device) -> list[tuple[int, int]]:
        """A site, and those after it whose numbers are few enough to be drawn with its own."""
        coming = self._coming.get((start, stop, device), [])
        if (place, size) not in coming:
            return [(place, size)]
        wanted, held = list[tuple[int, int]](), 0
        for one in coming[coming.index((place, size)) :]:
            held += 16 * (stop - start) * _blocks(one[1])
            if wanted and held > _SMALL:
                break
            wanted.append(one)
        return wanted


def counted(
    seed: int, step: int | Tensor, place: int, start: int, stop: int, size: int, dtype: torch.dtype, first: int = 0
) -> Tensor:
    """Rows start to stop - 1 of the signs at a place, (stop - start, size), by the counter's arithmetic.

    They are those behind the ``first`` of longer rows.
    """
    device = step.device if isinstance(step, Tensor) else torch.device("cpu")
    block, rest = divmod(first, 128)
    (octets,) = _drawn(seed, step, [(place, first + size)], start, stop, device, block)
    return _of_octets(octets, stop - start, rest + size, dtype)[:, rest:]


def _of_octets(octets: Tensor, count: int, size: int, dtype: torch.dtype) -> Tensor:
    """For each byte its eight signs, lowest bit first."""
    signs = _table(dtype, octets.device).index_select(0, octets.to(torch.int32))
    return signs.reshape(count, -1)[:, :size]


def _blocks(size: int) -> int:
    """Of 128 signs each."""
    return -(-size // 128)


def _drawn(
    seed: int,
    step: int | Tensor,
    places: Sequence[tuple[int, int]],
    start: int,
    stop: int,
    device: torch.device,
    block: int = 0,
) -> list[Tensor]:
    """Of several places and their sizes, the four bytes of each word, from a block of 128 signs on."""
    counts = [_blocks(size) - block for _, size in places]
    columns = torch.arange(block, block + max(counts), dtype=torch.int64, device=device)
    rows = torch.arange(start, stop, dtype=torch.int64, device=device).unsqueeze(1)
    marks = torch.full((1, 1), places[0][0], dtype=torch.int64, device=device)
    if len(places) > 1:
        marks = torch.tensor([[place for place, _ in places]], dtype=torch.int64, device=device)
        marks = marks.repeat_interleave(torch.tensor(counts, device=device), 1)
        columns = torch.cat([columns[:count] for count in counts])
    now = step.reshape(1, 1) if isinstance(step, Tensor) else torch.full((1, 1), step, device=device)
    words = torch.stack(philox([columns.unsqueeze(0), rows, marks, now], (seed & _MASK, seed >> 32 & _MASK)), -1)
    return [part.flatten() for part in words.to(torch.int32).view(torch.uint8).split(counts, 1)]


@cache
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """(256, 8): the signs of the bits of a byte."""
    bits = torch.arange(256, device="cpu").unsqueeze(1) >> torch.arange(8, device="cpu") & 1
    return (1 - 2 * bits).to(device, dtype)
