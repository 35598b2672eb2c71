"""Steps that are taken once more together: along Gaussian directions, with one learning rate and nothing else.

Such a step moves an entry by a function of its own number, the seed and the step. So many of them are taken by one
kernel, which reads and writes a parameter once; and nothing has to be asked or looked at between them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..directions import Plane
from ..directions.random import NormalRows
from ..directions.weighed import along
from ..optim.scaled import combined
from ..solvers import Status
from .step_record import StepRecord

__all__ = ["MOST", "kind_of", "take_together"]

MOST = 256  # steps in one go


def kind_of(record: StepRecord, header: dict[str, Any], groups: Sequence[int]) -> Hashable | None:
    """What steps that are taken together have in common; None for one that has to be taken by itself.

    ``groups`` are those of the parameters.
    """
    if list(header["directions"]) != ["Gaussian"] or len(record.coefficients) != 1 or record.block is not None:
        return None
    moves = {group for group, moving in zip(groups, record.moving or [True] * len(groups), strict=True) if moving}
    rates = {record.lrs[group] for group in moves}
    if len(rates) != 1 or any(record.decays[group] * record.lrs[group] for group in moves):
        return None
    k, dtype = record.coefficients.shape[1], record.coefficients.dtype
    return record.seed, k, dtype, _flags(record.moving), _flags(record.used)


def take_together(records: Sequence[StepRecord], leaves: Sequence[Tensor], groups: Sequence[int]) -> list[int]:
    """Move the parameters by steps of one kind. Returns the places of those that moved."""
    taken = [record for record in records if record.status is Status.OK]
    if not taken:
        return []
    first = taken[0]
    places = [n for n, moving in enumerate(first.moving or [True] * len(leaves)) if moving]
    shares = torch.cat([record.coefficients * record.lrs[groups[places[0]]] for record in taken])
    factors = torch.tensor([record.factor for record in taken], dtype=torch.float64, device="cpu")
    moving = [leaves[place] for place in places]
    found = []
    for position, used in enumerate(first.used or [True] * len(places)):
        if not used:
            continue
        leaf = moving[position]

        def delta_of(step: int, some: Tensor, position: int = position, leaf: Tensor = leaf) -> Tensor:
            plane = Plane(first.seed, step, 0, moving, list)
            return combined(some.to(leaf), NormalRows(len(some), plane).rows(position, leaf, 0, len(some)))

        along(leaf, first.seed, [record.step for record in taken], position, shares, factors, delta_of)
        found.append(places[position])
    return found


def _flags(mask: Sequence[bool] | None) -> tuple[bool, ...] | None:
    return None if mask is None else tuple(mask)
