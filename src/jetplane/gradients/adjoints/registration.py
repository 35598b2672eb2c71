"""Adjoints from outside: ``jetplane.register``, with what forward gradients want to know of an operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...ad._torch import OpOverload
from ...ad.algebra import registry
from ...ad.run.register import Register
from ..program.done import Done
from ..program.watch import Path
from . import adjoint as table
from .adjoint import INPUTS, RESULT, Adjoint

__all__ = ["Registration", "register"]


class Registration(Register):
    """Enters rules, and the adjoints of forward gradients.

    Example:
        >>> @torch.library.custom_op("docs::halved", mutates_args=())
        ... def halved(x: torch.Tensor) -> torch.Tensor:
        ...     return x / 2
        >>> register.linear(torch.ops.docs.halved)
        >>> register.remove(torch.ops.docs.halved)
    """

    def adjoint(self, op: Any, pull: Mapping[str, Callable[..., Tensor]]) -> None:
        """The vector-Jacobian products of ``op``, by the names of its arguments.

        ``pull[name](gradient, result, *args, **kwargs)`` is J^T gradient for that argument, of its shape, where
        ``gradient`` is the derivative at the (first) result. ``forward_gradient`` uses it for parameters and for
        activations. The engine needs a rule of the operation besides.

        Example:
            >>> import jetplane as jp
            >>> @torch.library.custom_op("docs::matmul", mutates_args=())
            ... def matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ...     return x @ w
            >>> matmul.register_vmap(lambda info, dims, x, w: (x @ w, 0)) and None
            >>> op = torch.ops.docs.matmul
            >>> register.bilinear(op)
            >>> register.adjoint(op, {"x": lambda g, y, x, w: g @ w.mT, "w": lambda g, y, x, w: x.mT @ g})
            >>> x, w = torch.eye(3), torch.ones(3, 2, requires_grad=True)
            >>> loss = jp.forward_gradient(lambda x: matmul(x, w).square().sum(1), [w], x)
            >>> assert torch.allclose(w.grad, torch.full((3, 2), 2 / 3))
            >>> register.remove(op)
        """
        by_place = _by_place(op, pull)

        def pulled(delta: Tensor, done: Done, path: Path) -> Tensor:
            return by_place[path[0]](delta, done.result, *done.args, **done.kwargs)

        paths = tuple((place,) for place in by_place)
        # with a parameter it is a layer: noise enters behind it, and is not taken through it to another one
        table.add(op, Adjoint(pulled, reads=(INPUTS, RESULT), paths=paths, apart=True))

    def remove(self, op: Any) -> None:
        """Take the rule and the adjoint of an operation out again."""
        known = op in table.registered()
        if known:
            table.remove(op)
        if not known or op in registry.registered():
            registry.remove(op)


def _by_place(op: Any, pull: Mapping[str, Callable[..., Tensor]]) -> dict[int | str, Callable[..., Tensor]]:
    """The functions by position and by name: an argument may be given either way."""
    overload = op if isinstance(op, OpOverload) else getattr(op, op.overloads()[0])
    names = registry.argument_names(overload)
    unknown = sorted(set(pull) - set(names))
    if unknown or not pull:
        raise ValueError(f"pull is of the arguments {unknown}; expected some of {list(names)}, those of {op}.")
    places: dict[int | str, Callable[..., Tensor]] = {n: pull[name] for n, name in enumerate(names) if name in pull}
    return places | dict(pull)


register = Registration()
