"""What an optimizer keeps for directions that remember, in its ``state`` as torch's optimizers do."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..directions import Family, Mixed

__all__ = ["fresh", "recall", "slots", "unstretched"]


def slots(family: Family) -> dict[str, tuple[int, ...]]:
    """The names of a family's memory, with the axes that precede those of a parameter."""
    found: dict[str, tuple[int, ...]] = getattr(family, "slots", {})
    return found


def fresh(family: Family, leaves: Sequence[Tensor]) -> int:
    """How many directions a family makes anew for each step: those that remember may well lie in the plane of others.

    Example:
        >>> from jetplane.directions import Gaussian, PreviousStep
        >>> fresh(Mixed([PreviousStep(), Gaussian(3)]), [torch.zeros(3)])
        3
    """
    if isinstance(family, Mixed):
        return sum(fresh(one, leaves) for one in family.families)
    return 0 if slots(family) else family.count(leaves)


def recall(
    state: MutableMapping[Any, Any], family: Family, leaves: Sequence[Tensor], labels: Sequence[str]
) -> dict[str, list[Tensor]]:
    """The memory of a family for these parameters; zero where there is none yet, as for a parameter that is new."""
    wanted = slots(family)
    memory: dict[str, list[Tensor]] = {name: [] for name in wanted}
    for name, axes in wanted.items():
        for leaf, label in zip(leaves, labels, strict=True):
            kept = state[leaf]
            if name not in kept:
                with torch.inference_mode(False):  # it is written outside of it, too
                    kept[name] = torch.zeros((*axes, *leaf.shape), dtype=leaf.dtype, device=leaf.device)
            found, expected = kept[name], (*axes, *leaf.shape)
            if tuple(found.shape) != expected or found.dtype != leaf.dtype or found.device != leaf.device:
                raise ValueError(
                    f"the memory {name!r} of {label} is {tuple(found.shape)} {found.dtype} on {found.device}; "
                    f"expected {expected} {leaf.dtype} on {leaf.device}."
                )
            memory[name].append(found)
    return memory


def unstretched(deltas: Sequence[Tensor], scales: Sequence[float | Tensor]) -> list[Tensor]:
    """The update in the units of the directions, before the groups' relative learning rates stretch them."""
    return [delta if scale in (0.0, 1.0) else delta / scale for delta, scale in zip(deltas, scales, strict=True)]
