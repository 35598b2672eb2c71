"""Where an optimizer stands, for its journal: all that steps change, and how it is set to that of another run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..directions import Memory
from ..optim import HyperplaneSearch
from ..optim.slots import recall
from . import snapshots
from .identity import Tracked

__all__ = ["rates_of", "set_numbers", "tensors_of"]


def tensors_of(optimizer: HyperplaneSearch, tracked: Tracked) -> dict[str, Tensor]:
    """All tensors that steps change, by the names in a snapshot."""
    leaves, names = tracked.leaves, tracked.names
    memory: Memory = recall(optimizer.state, optimizer._settings.family, leaves, names)
    return snapshots.named(leaves, list(tracked.buffers.values()), memory)


def rates_of(optimizer: HyperplaneSearch) -> tuple[list[float], list[float]]:
    """The learning rates and the weight decays of the groups."""
    lrs, decays = ([float(group[name]) for group in optimizer.param_groups] for name in ("lr", "weight_decay"))
    return lrs, decays


def set_numbers(
    optimizer: HyperplaneSearch, numbers: dict[str, Any], lrs: Sequence[float], decays: Sequence[float]
) -> None:
    """Let the numbers of all groups be these."""
    for group, lr, decay in zip(optimizer.param_groups, lrs, decays, strict=True):
        group.update(numbers)
        group["weight_decay"] = decay
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
