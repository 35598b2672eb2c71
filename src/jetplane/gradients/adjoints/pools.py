"""Pooling, sums and means."""

from __future__ import annotations

import torch
from torch import Tensor

from ..program.done import Done
from ..program.watch import Path
from .adjoint import Adjoint, enter

aten = torch.ops.aten


def _alive_maxima(alive: Tensor | None, done: Done, path: Path) -> Tensor | None:
    if alive is None:
        return None
    indices = done.out[1]
    space = 3 if "3d" in done.func.overloadpacket.__name__ else 2
    return alive.flatten(-space).gather(-1, indices.flatten(-space)).reshape(indices.shape)


def _alive_means(alive: Tensor | None, done: Done, path: Path) -> Tensor | None:
    return None if alive is None else done.func(alive.to(done.result.dtype), *done.args[1:], **done.kwargs) > 0


def _pull_max_pool(delta: Tensor, done: Done, path: Path) -> Tensor:
    options = list(done.bound().values())[1:]
    options[1] = options[1] or options[0]
    backward = getattr(aten, done.func.overloadpacket.__name__ + "_backward")
    return backward(delta, done.args[0], *options, done.out[1])


def _pull_adaptive_max_pool(delta: Tensor, done: Done, path: Path) -> Tensor:
    return getattr(aten, done.func.overloadpacket.__name__ + "_backward")(delta, done.args[0], done.out[1])


def _pull_mean_pool(delta: Tensor, done: Done, path: Path) -> Tensor:
    backward = getattr(aten, done.func.overloadpacket.__name__ + "_backward")
    if "adaptive" in done.func.overloadpacket.__name__:
        return backward(delta, done.args[0])
    options = list(done.bound().values())[1:]
    options[1] = options[1] or options[0]
    return backward(delta, done.args[0], *options)


def _pull_reduction(delta: Tensor, done: Done, path: Path) -> Tensor:
    bound = done.bound()
    x, axes = bound["self"], bound.get("dim")
    axes = [axis % x.ndim for axis in axes] if axes else list(range(x.ndim))
    if not bound.get("keepdim", False):
        for axis in sorted(axes):
            delta = delta.unsqueeze(axis)
    if done.func.overloadpacket is aten.mean:
        delta = delta / (x.numel() / max(1, done.result.numel()))
    return delta.to(x.dtype).expand(x.shape)


def _alive_reduction(alive: Tensor | None, done: Done, path: Path) -> Tensor | None:
    if alive is None:
        return None
    bound = done.bound()
    return alive.sum(bound["dim"] or None, keepdim=bound["keepdim"]) > 0 if "dim" in bound else None


enter(
    Adjoint(_pull_max_pool, alive=_alive_maxima),
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
)
enter(
    Adjoint(_pull_adaptive_max_pool, alive=_alive_maxima),
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
)
enter(
    Adjoint(_pull_mean_pool, alive=_alive_means),
    *(aten.avg_pool2d.default, aten.avg_pool3d.default),
    *(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default),
)
enter(Adjoint(_pull_reduction, alive=_alive_reduction), aten.mean.dim, aten.sum.dim_IntList)
enter(Adjoint(_pull_reduction, tail=True), aten.mean.default, aten.sum.default)
