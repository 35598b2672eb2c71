"""What stands in losses: softmax, its logarithm, and the class that is looked up."""

from __future__ import annotations

import torch
from torch import Tensor

from ..program.done import Done
from ..program.watch import Path
from .adjoint import INPUTS, RESULT, Adjoint, enter
from .entry_maps import along_axis

aten = torch.ops.aten


def _pull_softmax(delta: Tensor, done: Done, path: Path) -> Tensor:
    backward = getattr(aten, done.func.overloadpacket.__name__ + "_backward_data")
    x, dim = done.args[:2]
    return backward(delta, done.result, dim, x.dtype)


def _pull_nll(delta: Tensor, done: Done, path: Path) -> Tensor:
    backward = aten.nll_loss2d_backward if "2d" in done.func.overloadpacket.__name__ else aten.nll_loss_backward
    return backward(delta.contiguous(), *done.args, done.out[1])


def _pull_cross_entropy(delta: Tensor, done: Done, path: Path) -> Tensor:
    return aten.binary_cross_entropy_backward(delta, *done.args)


def _pull_gather(delta: Tensor, done: Done, path: Path) -> Tensor:
    x, dim, index = done.args[:3]
    return torch.zeros_like(x).scatter_add_(dim, index, delta)


def _pull_logsumexp(delta: Tensor, done: Done, path: Path) -> Tensor:
    bound, y = done.bound(), done.result
    x, axes = bound["self"], bound["dim"]
    if not bound["keepdim"]:
        for axis in sorted(axis % x.ndim for axis in axes):
            delta, y = delta.unsqueeze(axis), y.unsqueeze(axis)
    return delta * (x - y).exp()


enter(Adjoint(_pull_softmax, reads=(INPUTS, RESULT), tail=True), aten._log_softmax)
enter(Adjoint(_pull_softmax, live=along_axis, reads=(INPUTS, RESULT)), aten._softmax)
enter(
    Adjoint(
        lambda delta, done, path: aten._softmax_backward_data(delta, done.result, done.args[1], done.args[0].dtype),
        reads=(INPUTS, RESULT),
    ),
    aten._safe_softmax,
)
enter(Adjoint(_pull_nll, tail=True), aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
enter(Adjoint(_pull_cross_entropy, tail=True), aten.binary_cross_entropy.default)
enter(Adjoint(_pull_gather, tail=True), aten.gather)
enter(Adjoint(_pull_logsumexp, reads=(INPUTS, RESULT), tail=True), aten.logsumexp)
