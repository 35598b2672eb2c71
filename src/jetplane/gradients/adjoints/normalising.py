"""Norms: layer, group, RMS and batch norm."""

from __future__ import annotations

import torch
from torch import Tensor

from ..program.done import Done
from ..program.watch import Path
from . import batch_norm
from .adjoint import Adjoint, enter
from .entry_maps import last_axis
from .sums import total

aten = torch.ops.aten


def _pull_layer_norm(delta: Tensor, done: Done, path: Path) -> Tensor:
    x, shape, weight, bias, _ = done.args
    _, mean, rate = done.out
    return aten.native_layer_norm_backward(
        delta.contiguous(), x, shape, mean, rate, weight, bias, [True, False, False]
    )[0]


def _pull_group_norm(delta: Tensor, done: Done, path: Path) -> Tensor:
    x, weight, _, n, channels, space, groups, _ = done.args
    _, mean, rate = done.out
    sizes = n, channels, space, groups
    return aten.native_group_norm_backward(
        delta.contiguous(), x.contiguous(), mean, rate, weight, *sizes, [True, False, False]
    )[0]


def _pull_rms_norm(delta: Tensor, done: Done, path: Path) -> Tensor:
    x, shape, weight = done.args[:3]
    rate, axes = done.out[1], list(range(-len(shape), 0))
    scaled = (delta if weight is None else delta * weight) * rate
    return (scaled - x * rate.square() * (scaled * x).mean(axes, keepdim=True)).to(x.dtype)


def _layer_norm(delta: Tensor, done: Done, path: Path) -> Tensor:
    if path == (0,):
        return _pull_layer_norm(delta, done, path)
    x, shape, weight, bias, _ = done.args
    _, mean, rstd = done.out
    mask = [False, path == (2,), path == (3,)]
    parts = aten.native_layer_norm_backward(delta.contiguous(), x, shape, mean, rstd, weight, bias, mask)
    return parts[1] if path == (2,) else total(delta, list(range(delta.ndim - len(shape))), parts[2])


def _group_norm(delta: Tensor, done: Done, path: Path) -> Tensor:
    if path == (0,):
        return _pull_group_norm(delta, done, path)
    x, _, _, n, c, space, groups, _ = done.args
    shaped = delta.reshape(n, groups, c // groups, space)
    if path == (2,):
        return total(shaped, [0, 3]).flatten()
    mean, rstd = (one.reshape(n, groups, 1, 1) for one in done.out[1:])
    return (shaped * (x.reshape(shaped.shape) - mean) * rstd).sum((0, 3)).flatten()


def _rms_norm(delta: Tensor, done: Done, path: Path) -> Tensor:
    if path == (0,):
        return _pull_rms_norm(delta, done, path)
    x, shape = done.args[:2]
    return (delta * x * done.out[1]).to(x.dtype).sum_to_size(*shape)


def _batch_norm(delta: Tensor, done: Done, path: Path) -> Tensor:
    if path == (0,):
        return batch_norm.pull(delta, done, path)
    axes = [axis for axis in range(delta.ndim) if axis != 1]
    return total(delta, axes) if path == (2,) else (delta * batch_norm.normalised(done)).sum(axes)


enter(
    Adjoint(_pull_layer_norm, _layer_norm, live=last_axis, scales=True, norms_last=True), aten.native_layer_norm.default
)
enter(Adjoint(_pull_group_norm, _group_norm, scales=True), aten.native_group_norm.default)
enter(Adjoint(_pull_rms_norm, _rms_norm, live=last_axis, scales=True, norms_last=True), aten._fused_rms_norm.default)
enter(
    Adjoint(batch_norm.pull, _batch_norm, scales=True, norms_batch=True),
    *(aten.native_batch_norm.default, aten.cudnn_batch_norm.default),
    *(aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats),
    *(aten._batch_norm_with_update.default, aten._batch_norm_no_update.default),
    aten._native_batch_norm_legit_no_training.default,
)
