"""Where an optimizer stands, for its journal: all that steps change, and how it is set to that of another run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ad.run.parts import is_shared_out, own, part_of
from ..directions import Memory
from ..optim import HyperplaneSearch
from ..optim.slots import recall
from . import snapshots
from .identity import Tracked

__all__ = ["handed_over", "put", "rates_of", "set_numbers", "tensors_of"]

_HANDED: dict[int, dict[str, Tensor]] = {}  # by optimizer, what was gathered of it already


def tensors_of(optimizer: HyperplaneSearch, tracked: Tracked) -> dict[str, Tensor]:
    """All tensors that steps change, by the names in a snapshot.

    What processes share out is whole here, and all of them have to ask for it together.
    """
    if id(optimizer) in _HANDED:
        return _HANDED[id(optimizer)]
    found = _here(optimizer, tracked)
    return {name: one.detach().full_tensor() if is_shared_out(one) else one for name, one in found.items()}  # type: ignore[attr-defined]


@contextlib.contextmanager
def handed_over(optimizer: HyperplaneSearch, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Inside, :func:`tensors_of` gives these, and gathers nothing."""
    before = _HANDED.get(id(optimizer))
    _HANDED[id(optimizer)] = tensors
    try:
        yield
    finally:
        del _HANDED[id(optimizer)]
        if before is not None:
            _HANDED[id(optimizer)] = before


@torch.no_grad()
def put(optimizer: HyperplaneSearch, tracked: Tracked, tensors: dict[str, Tensor]) -> None:
    """Let all that steps change be these ``tensors``, which are whole."""
    shared = {f"parameter {n}": leaf for n, leaf in enumerate(tracked.leaves) if is_shared_out(leaf)}
    here = _here(optimizer, tracked)
    for name, tensor in tensors.items():
        if name in shared:
            own(shared[name]).copy_(part_of(tensor, shared[name]))
        else:
            here[name].copy_(tensor)


def _here(optimizer: HyperplaneSearch, tracked: Tracked) -> dict[str, Tensor]:
    """What every process has whole, and the parts of the rest."""
    memory: Memory = recall(optimizer.state, optimizer._settings.family, tracked.leaves, tracked.names)
    return snapshots.named(tracked.leaves, list(tracked.buffers.values()), memory)


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
