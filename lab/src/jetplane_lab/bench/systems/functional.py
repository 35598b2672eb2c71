"""torch.func: jvp of jvp over the pairs, and forward-over-reverse Hessian-vector products; eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, jvp, vmap

from ..problem import Derivatives, Params, Problem
from .system import Prepared, Setting, System, as_plane, torch_wait

__all__ = ["SYSTEMS"]

Loss = Callable[[Params], Tensor]
Way = Callable[[Callable[..., Tensor], int, Params, Params, Tensor, Tensor], Derivatives]


def _pair(loss: Loss, params: Params, vi: Params, vj: Params) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, its slope along vi, and vi^T H vj."""
    outer: Any = jvp(lambda p: jvp(loss, (p,), (vi,)), (params,), (vj,))
    (value, first), (_, second) = outer
    return value, first, second


def _row(v: Params, i: int) -> Params:
    return {name: rows[i] for name, rows in v.items()}


def _one(
    loss_of: Callable[..., Tensor], params: Params, vi: Params, vj: Params, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _pair(lambda p: loss_of(p, x, y), params, vi, vj)


def _loop(one: Callable[..., Any], k: int, params: Params, v: Params, x: Tensor, y: Tensor) -> Derivatives:
    """One pair after the other; what is compiled, if anything, is one pair: all of them would take minutes."""
    found = {(i, j): one(params, _row(v, i), _row(v, j), x, y) for i in range(k) for j in range(i, k)}
    slope = torch.stack([found[i, i][1] for i in range(k)])
    entries = [found[min(i, j), max(i, j)][2] for i in range(k) for j in range(k)]
    return Derivatives(found[0, 0][0], slope, torch.stack(entries).reshape(k, k))


def _pairs(loss_of: Callable[..., Tensor], k: int, params: Params, v: Params, x: Tensor, y: Tensor) -> Derivatives:
    i, j = torch.triu_indices(k, k, device=x.device)
    left, right = ({name: rows[side] for name, rows in v.items()} for side in (i, j))
    value, slope, entries = vmap(lambda a, b: _pair(lambda p: loss_of(p, x, y), params, a, b))(left, right)
    n = torch.arange(k, device=x.device)
    curvature = entries.new_zeros(k, k)
    curvature[i, j] = entries
    curvature[j, i] = entries
    return Derivatives(value[0], slope[n * k - n * (n - 1) // 2], curvature)  # where the pairs (n, n) stand


def _nested(loss_of: Callable[..., Tensor], k: int, params: Params, v: Params, x: Tensor, y: Tensor) -> Derivatives:
    def entry(a: Params, b: Params) -> tuple[Tensor, Tensor, Tensor]:
        return _pair(lambda p: loss_of(p, x, y), params, a, b)

    value, slope, entries = vmap(lambda a: vmap(lambda b: entry(a, b))(v))(v)
    return Derivatives(value[0, 0], slope[:, 0], entries)


def _hvp(loss_of: Callable[..., Tensor], k: int, params: Params, v: Params, x: Tensor, y: Tensor) -> Derivatives:
    def along(direction: Params) -> Any:
        gradient = grad_and_value(lambda p: loss_of(p, x, y))
        outer: Any = jvp(gradient, (params,), (direction,))
        (primal, value), (second, _) = outer
        return value, primal, second

    shared: Any = (None, None, 0)  # loss and gradient are the same for all directions
    value, gradients, products = vmap(along, out_dims=shared)(v)
    slope = sum(v[name].flatten(1) @ g.flatten() for name, g in gradients.items())
    curvature = sum(v[name].flatten(1) @ h.flatten(1).T for name, h in products.items())
    assert isinstance(slope, Tensor) and isinstance(curvature, Tensor)
    return Derivatives(value, slope, curvature)


def _prepare(way: Way, options: dict[str, Any] | None, problem: Problem, setting: Setting) -> Prepared:
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        if options is None:
            return function
        return torch.compile(function, fullgraph=True, dynamic=False, **options)

    run: Callable[..., Derivatives]
    if way is _loop:
        run = partial(_loop, compiled(partial(_one, problem.loss_of)), problem.k)
    else:
        run = compiled(partial(way, problem.loss_of, problem.k))
    arguments = problem.constants, problem.directions, problem.x, problem.y

    def call() -> Derivatives:
        with torch.no_grad():
            return run(*arguments)

    return Prepared(call, as_plane, torch_wait(setting.device))


def _peer(name: str, about: str, way: Way) -> System:
    return System(name, about, "peer", partial(_prepare, way, None))


def _compiled(twin: str, way: Way) -> System:
    about = f"{twin} under torch.compile"
    return System(f"{twin}-compiled", about, "peer", partial(_prepare, way, {}), compiled=True, twin=twin)


def _on_cuda(setting: Setting) -> str | None:
    return None if setting.device.startswith("cuda") else "CUDA graphs need a CUDA device"


SYSTEMS = (
    _peer("func-loop", "torch.func: jvp of jvp, one pair after the other", _loop),
    _peer("func-pairs", "torch.func: vmap over the K(K+1)/2 pairs of jvp of jvp", _pairs),
    _peer("func-nested", "torch.func: vmap of vmap of jvp of jvp, all K x K entries", _nested),
    _peer("func-hvp", "torch.func: vmap of jvp of grad (needs backprop)", _hvp),
    _compiled("func-loop", _loop),
    _compiled("func-pairs", _pairs),
    _compiled("func-nested", _nested),
    _compiled("func-hvp", _hvp),
    System(
        "func-nested-graph",
        "func-nested under torch.compile, replayed as a CUDA graph",
        "peer",
        partial(_prepare, _nested, {"mode": "reduce-overhead"}),
        missing=_on_cuda,
        compiled=True,
        twin="func-nested",
    ),
)
