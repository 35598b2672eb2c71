"""What is run: a model, and a call of it that gives tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Built", "Program", "loss_of", "tensors"]


class Built(NamedTuple):
    """A model and what it is called with."""

    model: nn.Module
    call: Callable[[], Any]
    approximate: bool = False  # whether its own backward pass is an approximation, and its values say what is right


class Program(NamedTuple):
    """A program by name, ``package/family``, and how it is built."""

    name: str
    build: Callable[[], Built]


def tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in what a model returned, in a fixed order."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))


def loss_of(value: Any) -> Tensor:
    """A scalar with curvature of all that a model returned; masks of minus infinity are bounded by tanh."""
    parts = []
    for index, tensor in enumerate(tensors(value)):
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        weight = torch.linspace(0.5, 1.5, max(tensor.numel(), 1), dtype=tensor.dtype)[: tensor.numel()]
        parts.append(((tensor + 0.1 * (index + 1)).tanh() * weight.reshape(tensor.shape)).mean())
    if not parts:
        raise TypeError(f"the program returned {type(value).__name__} without a floating-point tensor")
    return torch.stack(parts).sum()
