"""The two ways to hand over a program: a function of tensors, or a closure that uses tensors in place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from .. import _torch


def as_closure(func: Callable[..., Any], primals: Any) -> tuple[Callable[[], Any], dict[str, Tensor]]:
    """A program without arguments, and the tensors that it varies with by name.

    A ``func`` that takes no arguments uses ``primals`` (tensors, or a mapping of names to tensors) in place;
    any other is called with clones of ``primals``.
    """
    if not callable(func):
        raise TypeError(f"func is {type(func).__name__}; expected a callable.")
    if _takes_nothing(func):
        named = dict(primals) if isinstance(primals, Mapping) else _numbered(primals)
        if not named:
            raise ValueError("params is empty; expected at least one tensor to perturb.")
        return func, named
    leaves, structure = _torch.pytree.tree_flatten(primals)
    if not leaves:
        raise ValueError("primals hold no tensor; expected at least one to perturb.")
    clones = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    arguments = _torch.pytree.tree_unflatten(clones, structure)

    def program() -> Any:
        return func(*arguments) if isinstance(arguments, tuple) else func(arguments)

    return program, {f"primal {i}": clone for i, clone in enumerate(clones)}


def _numbered(params: Iterable[Tensor] | Tensor) -> dict[str, Tensor]:
    tensors = [params] if isinstance(params, Tensor) else list(params)
    return {f"parameter {i}": tensor for i, tensor in enumerate(tensors)}


def _takes_nothing(func: Callable[..., Any]) -> bool:
    try:
        return not inspect.signature(func).parameters
    except (TypeError, ValueError):  # builtins without a signature
        return False
