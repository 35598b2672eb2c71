"""The gradient of a parameter: by its operation's record, or by default that of the one operation by autograd.

The default copies the operation's arguments, runs it once more and frees its graph at once: the derivative goes no
further than from the result to the parameter. Noise needs none of it on its way: it enters behind what has no record.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import guard
from ...ad import _torch
from ...ad.draws import draws
from ...ad.engine.locate import call_site
from ...errors import MissingRule
from ..program.done import Done
from ..program.parameters import pulled_back
from ..program.watch import Path, Visit, at, replaced
from .adjoint import lookup

__all__ = ["check", "product", "vjp"]


def product(delta: Tensor, done: Done, path: Path) -> Tensor:
    """The gradient of the parameter at ``path``, for the derivative at the result."""
    # of complex numbers torch knows the conjugates; where an argument is complex, so is the result of a layer
    known = None if delta.is_complex() else lookup(done.func).product_to(path)
    if known is not None:
        return known(delta, done, path)
    guard.count_default(str(done.func))
    return vjp(delta, done, path)


def vjp(delta: Any, done: Done, path: Path) -> Tensor:
    """J^T delta of one operation by one of its arguments; ``delta`` is at its first result, or a list for several.

    Example:
        >>> x, w = torch.ones(2, 3), torch.ones(3)
        >>> vjp(torch.ones(2), Done(torch.ops.aten.mv.default, (x, w), {}, x @ w), (1,))
        tensor([2., 2., 2.])
    """
    # copies: in memory of their own they are no part of the program, of which a pass may be under way
    args, kwargs = _torch.pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (done.args, done.kwargs))
    leaf = at(path, args, kwargs).requires_grad_()
    args, kwargs = replaced(path, args, kwargs, leaf)
    with guard.local(), torch.enable_grad():
        out = done.func(*args, **kwargs)
        results = list(out) if isinstance(out, tuple | list) else [out]
        deltas = delta if isinstance(delta, list) else [delta]
        pairs = [(y, d) for y, d in zip(results, deltas, strict=False) if d is not None]
        (found,) = pulled_back([y for y, _ in pairs], [leaf], [d for _, d in pairs])
    assert found is not None
    return found.detach()


def check(visit: Visit, names: str) -> None:
    """Raise if the gradient of a parameter of an operation is not known, and autograd does not know it either."""
    func = visit.functional
    found = lookup(func)
    unknown = [path for path, _ in visit.parameters if found.product_to(path) is None]
    if not unknown:
        return
    guard.refuse_default(str(func))
    reason = _obstacle(func, visit, unknown)
    if reason is not None:
        raise MissingRule(
            f"{visit.func} has no local product for its parameter {names}, {call_site('called')}, and autograd cannot "
            f"differentiate it by itself: {reason}; expected an adjoint, as of jetplane.register.adjoint(torch.ops."
            f"{func}, ...).",
            str(visit.func),
        )


def _obstacle(func: Any, visit: Visit, paths: list[Path]) -> str | None:
    """Why the default does not do for an operation; None if it does."""
    if draws(func, visit.args, visit.kwargs):
        return "it draws random numbers"
    if func._schema.is_mutable:
        return "it writes to its arguments"
    done = Done(func, visit.args, visit.kwargs, None)
    try:
        first = func(*visit.args, **visit.kwargs)
        first = first[0] if isinstance(first, tuple | list) else first
        for path in paths:
            vjp(torch.zeros_like(first), done, path)
    except (RuntimeError, NotImplementedError) as error:  # torch has no other sign of it
        return str(error).splitlines()[0].rstrip(".")
    return None
