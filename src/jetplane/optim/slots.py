"""What an optimizer keeps for directions that remember, in its ``state`` as torch's optimizers do."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..directions import Learning

__all__ = ["recall"]


def recall(
    state: MutableMapping[Any, Any], family: Learning, leaves: Sequence[Tensor], labels: Sequence[str]
) -> dict[str, list[Tensor]]:
    """The memory of a family for these parameters; zero where there is none yet, as for a parameter that is new."""
    wanted = family.init().slots
    return {
        name: [_kept(state[leaf], name, axes, leaf, label) for leaf, label in zip(leaves, labels, strict=True)]
        for name, axes in wanted.items()
    }


def _kept(state: dict[str, Tensor], name: str, axes: tuple[int, ...], leaf: Tensor, label: str) -> Tensor:
    """What is remembered for one parameter."""
    expected = (*axes, *leaf.shape)
    if name not in state:
        with torch.inference_mode(False):  # it is written outside of it, too
            state[name] = torch.zeros(expected, dtype=leaf.dtype, device=leaf.device)
    found = state[name]
    if tuple(found.shape) != expected or found.dtype != leaf.dtype or found.device != leaf.device:
        raise ValueError(
            f"the memory {name!r} of {label} is {tuple(found.shape)} {found.dtype} on {found.device}; "
            f"expected {expected} {leaf.dtype} on {leaf.device}."
        )
    return found
