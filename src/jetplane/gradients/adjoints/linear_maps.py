"""Products of matrices, and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..program.done import Done
from ..program.watch import Path
from .adjoint import Adjoint, enter
from .default import vjp
from .entry_maps import rows
from .sums import summed, total

aten = torch.ops.aten


def _factor(delta: Tensor, left: Tensor, right: Tensor, which: int) -> Tensor:
    return delta @ right.mT if which == 0 else left.mT @ delta


def _product(delta: Tensor, done: Done, path: Path) -> Tensor:
    left, right = done.args
    return _factor(delta, left, right, int(path[0]))


def _pull_addmm(delta: Tensor, done: Done, path: Path) -> Tensor:
    return delta @ done.args[2].mT * done.kwargs.get("alpha", 1)


def _addmm(delta: Tensor, done: Done, path: Path) -> Tensor:
    bias, left, right = done.args[:3]
    beta, alpha = done.kwargs.get("beta", 1), done.kwargs.get("alpha", 1)
    if path == (0,):
        return summed(delta if beta == 1 else beta * delta, bias)
    gradient = _factor(delta, left, right, int(path[0]) - 1)
    return gradient if alpha == 1 else alpha * gradient


def _mv(delta: Tensor, done: Done, path: Path) -> Tensor:
    matrix, vector = done.args
    return torch.outer(delta, vector) if path == (0,) else matrix.T @ delta


def _dot(delta: Tensor, done: Done, path: Path) -> Tensor:
    return delta * done.args[1 - int(path[0])]


def _grouped(delta: Tensor, done: Done, path: Path) -> Tensor:
    """A product for each group of rows, columns or inner places: ``offs`` divides the axis that two of three have."""
    left, right, offs = done.args[0], done.args[1], done.bound()["offs"]
    delta = delta.to(left.dtype).contiguous()  # the kernel reads rows or columns in memory, and nothing expanded
    if path == (0,):
        return aten._grouped_mm(delta, right.mT, offs)
    if path == (1,):
        return aten._grouped_mm(left.mT, delta, offs)
    return vjp(delta, done, path)


def _live_grouped(
    wanted: Tensor, made: torch.Size, shape: torch.Size, path: Path, settings: Sequence[Any]
) -> Tensor | None:
    """Where the groups are of rows, each row is by itself."""
    return wanted.any(-1, keepdim=True) if path == (0,) and len(shape) == len(made) == 2 else None


def _convolution(delta: Tensor, done: Done, path: Path) -> Tensor:
    x, weight, bias, *options = done.args
    if x.ndim == len(options[0]) + 1:  # without a batch
        done = replace(done, args=(x.unsqueeze(0), *done.args[1:]))
        found = _convolution(delta.unsqueeze(0), done, path)
        return found.squeeze(0) if path == (0,) else found
    if path == (2,):
        return total(delta, [0, *range(2, delta.ndim)])
    sizes = None if bias is None else list(bias.shape)
    x_part, weight_part, _ = aten.convolution_backward(
        delta, x, weight, sizes, *options[:6], [path == (0,), path == (1,), False]
    )
    return weight_part if path == (1,) else x_part


enter(Adjoint(_product, _product, live=rows(0), weights=True), aten.mm.default)
enter(Adjoint(_product, _product, live=rows(0), paths=((0,), (1,)), apart=True), aten.bmm.default)
enter(Adjoint(_pull_addmm, _addmm, live=rows(1), paths=((1,),), weights=True), aten.addmm.default)
enter(Adjoint(product=_addmm), aten.baddbmm.default)
enter(Adjoint(product=_mv), aten.mv.default)
enter(Adjoint(product=_dot), aten.dot.default)
enter(Adjoint(_grouped, _grouped, live=_live_grouped, weights=True), aten._grouped_mm.default)
enter(Adjoint(product=_convolution), aten.convolution.default, aten._convolution.default)
