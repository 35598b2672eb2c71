"""A tree of state (numbers, text, lists, dicts, tensors) as JSON with the tensors apart, and back.

Floats survive exactly: JSON holds their shortest repr. Tuples and dicts whose keys are not text keep their kind.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["pack", "unpack"]


def pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON; its tensors are entered into ``tensors`` under names that begin with ``name``.

    Example:
        >>> import torch
        >>> tensors = {}
        >>> packed = pack({"betas": (0.9, 0.999), "state": {0: torch.ones(2)}}, "opt", tensors)
        >>> list(tensors)
        ['opt.state.0']
        >>> unpack(packed, tensors)
        {'betas': (0.9, 0.999), 'state': {0: tensor([1., 1.])}}
    """
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, pack(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [pack(item, f"{name}.{number}", tensors) for number, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{name} is {type(value).__name__}; a checkpoint holds numbers, text, tensors, lists and dicts.")


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """What was packed."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if isinstance(value, dict):
        ((kind, inner),) = value.items()
        if kind == "tensor":
            return tensors[inner]
        if kind == "tuple":
            return tuple(unpack(item, tensors) for item in inner)
        return {key: unpack(item, tensors) for key, item in inner}
    return value
