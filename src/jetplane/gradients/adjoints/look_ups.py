"""Look-ups in a table of parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from ..program.done import Done
from ..program.watch import Path
from .adjoint import Adjoint, enter

aten = torch.ops.aten


def _embedding(delta: Tensor, done: Done, path: Path) -> Tensor:
    weight, indices, padding, scale, _ = done.bound().values()
    return aten.embedding_dense_backward(delta, indices, weight.shape[0], padding, scale)


def _index_select(delta: Tensor, done: Done, path: Path) -> Tensor:
    parameter, dim, index = done.args
    return torch.zeros_like(parameter).index_add_(dim, index, delta)


def _index(delta: Tensor, done: Done, path: Path) -> Tensor:
    parameter, indices = done.args
    return aten.index_put(torch.zeros_like(parameter), indices, delta, True)


enter(Adjoint(product=_embedding), aten.embedding.default)
enter(Adjoint(product=_index_select), aten.index_select.default)
enter(Adjoint(product=_index), aten.index.Tensor)
