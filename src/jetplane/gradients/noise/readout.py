"""The input of the loss, z: its tangents and the losses' exact derivative by it, by sample and token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..plan.noise_plan import NoisePlan
from ..program.layout import Grid, guess

__all__ = ["Readout"]


class Readout:
    """What one call sees of z. Where no tokens are told apart, a sample is one token."""

    def __init__(self, plan: NoisePlan) -> None:
        assert plan.tail is not None
        self.paired = plan.tokens is not None  # whether the scalars are those of tokens
        self.samples, self.count = plan.samples, 1 if plan.tokens is None else plan.tokens.count
        self._shapes = plan.tail.inputs
        self._grids: dict[int, Grid] = {}
        for node, shape in plan.tail.inputs.items():
            # not proven as those of the sites are: a wrong one makes a poor prediction, and no bias
            layout = guess(shape, plan.samples)
            if plan.tokens is not None:
                self._grids[node] = plan.tokens.grid
            elif layout is not None:
                self._grids[node] = Grid(layout)
        self._slopes: Tensor | None = None

    @property
    def width(self) -> int:
        """The numbers of one token; 0 where nothing can be split by sample."""
        return sum(self._shapes[node].numel() for node in self._grids) // (self.samples * self.count)

    @property
    def has_slopes(self) -> bool:
        """Whether the losses' derivative was taken."""
        return self._slopes is not None

    @property
    def slopes(self) -> Tensor:
        """d sum(losses) / d z (B, T, V)."""
        assert self._slopes is not None
        return self._slopes

    def take(self, slopes: Mapping[int, Tensor]) -> None:
        """The losses' derivative by each input (*S)."""
        self._slopes = self.rows({node: slope.unsqueeze(0) for node, slope in slopes.items()}, 1)[0]

    def rows(self, tangents: Mapping[int, Tensor | None], k: int) -> Tensor:
        """Tangents (K, *S) of the inputs as (K, B, T, V)."""
        like = next((rows for rows in tangents.values() if rows is not None), self._slopes)
        assert like is not None
        parts = []
        for node, grid in self._grids.items():
            rows = tangents[node]
            given = like.new_zeros((k, *self._shapes[node])) if rows is None else rows
            parts.append(grid.split(given, self.samples, self.count))
        joined = parts[0] if len(parts) == 1 else torch.cat([part.to(parts[0]) for part in parts], -1)
        return joined.to(torch.promote_types(joined.dtype, torch.float32))
