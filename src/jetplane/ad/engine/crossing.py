"""What crosses the boundary between model and loss, where the directions are taken in several passes."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import UnsupportedProgram

__all__ = ["Crossing", "crossings"]


class Crossing:
    """What crosses the boundary in a pass over one chunk of the directions.

    The passes over all chunks but the last keep the tangents that cross it; the last one puts all of them together,
    so that the loss sees every pair. The program does the same in each of them, so they are told apart by their order.
    """

    def __init__(self, kept: list[list[Tensor]], number: int, last: bool) -> None:
        self._kept = kept
        self._number = number
        self._last = last
        self._place = 0

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows (K of the chunk, *S), in the last pass those of all chunks."""
        place, self._place = self._place, self._place + 1
        if not self._number and place == len(self._kept):
            self._kept.append([])
        before = self._kept[place] if place < len(self._kept) else None
        if before is None or len(before) != self._number or (before and before[0].shape[1:] != rows.shape[1:]):
            raise UnsupportedProgram(
                "the program took another course when it was run again for further directions; expected the same "
                "operations each time, or chunk_size=None."
            )
        if self._last:
            return torch.cat([*before, rows]) if before else rows
        before.append(rows)
        return rows


def crossings(count: int) -> list[Crossing]:
    """One for each of ``count`` chunks, in the order in which they are run."""
    kept: list[list[Tensor]] = []
    return [Crossing(kept, number, number == count - 1) for number in range(count)]
