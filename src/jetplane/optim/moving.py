"""The parameters that a step moves, with the numbers of their groups, and the checks of what the user gives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ad.run.parts import is_shared_out

__all__ = [
    "Moving",
    "check_distinct",
    "check_group",
    "check_together",
    "check_whole",
    "labels",
    "listed",
    "moving_of",
    "number_of",
]


class Moving(NamedTuple):
    """The parameters that move: one entry of each list for each of them."""

    tensors: list[Tensor]
    labels: list[str]
    lrs: list[float]
    decays: list[float]

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def entries(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)

    @property
    def shared_out(self) -> bool:
        """Whether a process may have a part of some of them alone."""
        return any(map(is_shared_out, self.tensors))

    @property
    def everywhere(self) -> tuple[list[Tensor], list[str]]:
        """Those that every process has, with their labels."""
        found = [one for one in zip(self.tensors, self.labels, strict=True) if not is_shared_out(one[0])]
        return [tensor for tensor, _ in found], [label for _, label in found]


def moving_of(groups: Sequence[dict[str, Any]]) -> Moving:
    """The parameters that require grad."""
    moving = Moving([], [], [], [])
    for number, group in enumerate(groups):
        check_group(group)
        names = labels(group, f"group {number}'s " if len(groups) > 1 else "")
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        for leaf, label in zip(group["params"], names, strict=True):
            if leaf.requires_grad:
                moving.tensors.append(leaf)
                moving.labels.append(label)
                moving.lrs.append(lr)
                moving.decays.append(decay)
    return moving


def labels(group: dict[str, Any], prefix: str) -> list[str]:
    """What the parameters of a group are called."""
    names = group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]
    return [prefix + name for name in names]


def check_together(moving: Moving, count: int) -> None:
    """Raise unless these parameters can be moved together, along ``count`` directions that are made anew."""
    for leaf, label in zip(moving.tensors, moving.labels, strict=True):
        if leaf.device != moving.device:
            raise ValueError(
                f"{label} is on {leaf.device} and {moving.labels[0]} on {moving.device}; "
                "expected all parameters on one device."
            )
    if moving.device.type == "meta":
        raise ValueError(f"{moving.labels[0]} is on meta, where there are no numbers; expected it on another device.")
    size = moving.entries
    if count > size:
        raise ValueError(f"k is {count}, but the parameters have {size} entries; expected at most as many.")


def check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise unless an option is a whole number within its bounds."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; expected a whole number.")
    if value < least or (most is not None and value > most):
        upper = "" if most is None else f" to {most}"
        raise ValueError(f"{name} is {value}; expected a whole number from {least}{upper}.")


def number_of(name: str, value: Any) -> float:
    """The number that an option is, or that it holds as a tensor of one element."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # which of them, is a question of torch's version
        raise TypeError(f"{name} is {value!r}; expected a number, or a tensor of one element.") from error


def listed(params: Any) -> list[Any]:
    """The parameters, or groups of them, that an optimizer is given."""
    if isinstance(params, Tensor):
        shape = tuple(params.shape)
        raise TypeError(f"params is a tensor of shape {shape}; expected a list of parameters, as [tensor].")
    if not isinstance(params, Iterable):
        name = type(params).__name__
        raise TypeError(f"params is {name}; expected parameters, as those of module.parameters(), or groups of them.")
    return list(params)


def check_group(group: dict[str, Any]) -> None:
    """Raise unless the numbers of a group are what a step can use."""
    for name in ("lr", "weight_decay"):
        value = number_of(name, group[name])
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}; expected a finite number that is not negative.")


def check_distinct(params: list[Any], groups: list[dict[str, Any]]) -> None:
    """Raise where a parameter is there already."""
    seen = {id(leaf): "another group" for group in groups for leaf in group["params"]}
    for position, entry in enumerate(params):
        name, leaf = entry if isinstance(entry, tuple) else (f"parameter {position}", entry)
        if id(leaf) in seen:  # what is no tensor is refused later
            raise ValueError(f"{name} is in {seen[id(leaf)]} already; expected each parameter once.")
        seen[id(leaf)] = "the parameter list"
