"""What is run: a model, and a call of it that gives tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Built", "Ids", "Program", "loss_of", "module", "tensors"]


class Built(NamedTuple):
    """A model and what it is called with."""

    model: nn.Module
    call: Callable[[], Any]
    approximate: bool = False  # whether its own backward pass is an approximation, and its values say what is right


class Program(NamedTuple):
    """A program by name, ``package/family``, and how it is built."""

    name: str
    build: Callable[[], Built]


class Ids(NamedTuple):
    """In the place of an input: whole numbers below a limit."""

    limit: int
    shape: tuple[int, ...]


def module(path: str, options: dict[str, Any], *inputs: Any, train: bool = False, **named: Any) -> Callable[[], Built]:
    """A class by its dotted path, made with ``options`` and called with random tensors of the shapes that are given."""

    def build() -> Built:
        where, _, name = path.rpartition(".")
        made = getattr(importlib.import_module(where), name)(**options).double().train(train)
        given, more = [_input(one) for one in inputs], {key: _input(one) for key, one in named.items()}
        return Built(made, lambda: made(*given, **more))

    return build


def _input(given: Any) -> Any:
    if isinstance(given, Ids):
        return torch.randint(0, given.limit, given.shape)
    return torch.randn(given) if isinstance(given, tuple) else given


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
