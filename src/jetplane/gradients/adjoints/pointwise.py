"""Element by element: arithmetic, activations, masks."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ad.algebra.jet import Operand, PairSet
from ...ad.algebra.registry import plan
from ..program.done import Done
from ..program.watch import Path, at, replaced
from .adjoint import RESULT, Adjoint, both, enter, enter_elementwise
from .entry_maps import same_entry
from .sums import summed

aten = torch.ops.aten


def slope(done: Done, path: Path) -> Tensor | None:
    """The derivative of each entry of the result by its entry of the argument at ``path``; None for zero."""
    value = at(path, done.args, done.kwargs)
    args, kwargs = replaced(path, done.args, done.kwargs, Operand(value, torch.ones_like(value).unsqueeze(0), None))
    rule = plan(done.func).apply
    assert rule is not None
    out = rule(PairSet.none(1), done.func, *args, **kwargs)
    out = out[0] if isinstance(out, tuple | list) else out
    return out.tangent[0] if isinstance(out, Operand) and out.tangent is not None else None


def _pull_elementwise(delta: Tensor, done: Done, path: Path) -> Tensor:
    value = at(path, done.args, done.kwargs)
    factor = slope(done, path)
    return torch.zeros_like(value) if factor is None else summed(delta * factor, value)


def _alive_elementwise(alive: Tensor | None, done: Done, path: Path) -> Tensor | None:
    if alive is not None and alive.shape != done.result.shape:
        alive = alive.expand(done.result.shape)
    if done.func.overloadpacket in _FLAT:
        factor = slope(done, path)
        return both(alive, None if factor is None else factor != 0)
    return both(alive, _gate(done, path)) if done.func is aten.mul.Tensor else alive


def _gate(done: Done, path: Path) -> Tensor | None:
    """Where the other factor of a product is not zero: a mask of dropout, or a gate."""
    other = done.args[1] if path == (0,) else done.args[0]
    return other != 0 if isinstance(other, Tensor) and other.shape == done.result.shape else None


enter_elementwise(
    Adjoint(_pull_elementwise, _pull_elementwise, _alive_elementwise, same_entry, paths=None, scales=True)
)
# functions whose derivative is exactly zero on an interval
_FLAT = {aten.threshold, aten.hardtanh, aten.hardsigmoid, aten.hardswish, aten.hardshrink, aten.softshrink, aten.clamp,
         aten.clamp_min, aten.clamp_max}  # fmt: skip


def _pull_relu(delta: Tensor, done: Done, path: Path) -> Tensor:
    return aten.threshold_backward(delta, done.result, 0)


def _alive_relu(alive: Tensor | None, done: Done, path: Path) -> Tensor | None:
    return both(alive, done.result > 0)


enter(Adjoint(_pull_relu, alive=_alive_relu, reads=(RESULT,)), aten.relu)


def _pull_sum_of_two(delta: Tensor, done: Done, path: Path) -> Tensor:
    factor = 1 if path == (0,) else done.kwargs.get("alpha", done.args[2] if len(done.args) > 2 else 1)
    if done.func.overloadpacket is aten.sub and path == (1,):
        factor = -factor
    return summed(delta if factor == 1 else delta * factor, at(path, done.args, done.kwargs))


def _passes(alive: Tensor | None, done: Done, path: Path) -> Tensor | None:
    return alive if alive is None or alive.shape == done.result.shape else alive.expand(done.result.shape)


enter(Adjoint(_pull_sum_of_two, alive=_passes, reads=(), paths=((0,), (1,))), aten.add.Tensor, aten.sub.Tensor)


def _pull_where(delta: Tensor, done: Done, path: Path) -> Tensor:
    condition = done.args[0] if path == (1,) else ~done.args[0]
    return summed(torch.where(condition, delta, 0.0), at(path, done.args, done.kwargs))


def _alive_where(alive: Tensor | None, done: Done, path: Path) -> Tensor | None:
    condition = done.args[0] if path == (1,) else ~done.args[0]
    return both(_passes(alive, done, path), condition.expand(done.result.shape))


enter(Adjoint(_pull_where, _pull_where, _alive_where, paths=((1,), (2,))), aten.where.self)
enter(
    Adjoint(
        lambda delta, done, path: summed(delta.masked_fill(done.args[1], 0), done.args[0]),
        alive=lambda alive, done, path: both(_passes(alive, done, path), ~done.args[1].expand(done.result.shape)),
    ),
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
)
enter(
    Adjoint(
        lambda delta, done, path: _through_dropout(delta, done),
        alive=lambda alive, done, path: alive if done.args[2] is False else both(alive, done.out[1]),
    ),
    aten.native_dropout.default,
)


def _through_dropout(delta: Tensor, done: Done) -> Tensor:
    _, p, train = done.args
    return delta if train is False else delta * done.out[1] * (0.0 if p == 1 else 1 / (1 - p))
