"""Entries that are moved, copied, left out or put together."""

from __future__ import annotations

import torch
from torch import Tensor

from ..program.done import Done
from ..program.watch import Path
from .adjoint import Adjoint, enter
from .entry_maps import part, reshaped, turned
from .sums import summed

aten = torch.ops.aten


def _reshaped(delta: Tensor, done: Done, path: Path) -> Tensor:
    return delta.reshape(done.args[0].shape)


def _same_operation(alive: Tensor | None, done: Done, path: Path) -> Tensor | None:
    return None if alive is None else done.func(alive, *done.args[1:], **done.kwargs)


def _alive_reshaped(alive: Tensor | None, done: Done, path: Path) -> Tensor | None:
    return None if alive is None else alive.reshape(done.result.shape)


def _pull_permute(delta: Tensor, done: Done, path: Path) -> Tensor:
    inverse = [0] * len(done.args[1])
    for place, axis in enumerate(done.args[1]):
        inverse[axis] = place
    return delta.permute(inverse)


def _pull_copy(delta: Tensor, done: Done, path: Path) -> Tensor:
    return delta.to(done.args[0])


def _pull_transpose(delta: Tensor, done: Done, path: Path) -> Tensor:
    return delta.transpose(*done.args[1:])


def _pull_select(delta: Tensor, done: Done, path: Path) -> Tensor:
    return aten.select_backward(delta, done.args[0].shape, *done.args[1:])


def _pull_slice(delta: Tensor, done: Done, path: Path) -> Tensor:
    x, dim, start, stop, step = done.bound().values()
    size = x.shape[dim]
    start, stop = (0 if start is None else start), (size if stop is None else min(stop, size))
    return aten.slice_backward(delta, x.shape, dim, start, stop, step)


def _pull_split(deltas: list[Tensor | None], done: Done, path: Path) -> Tensor:
    parts = [torch.zeros_like(out) if d is None else d for d, out in zip(deltas, done.out, strict=True)]
    dim = done.bound()["dim"]
    return torch.stack(parts, dim) if done.func is aten.unbind.int else torch.cat(parts, dim)


def _own_part(whole: Tensor, done: Done, path: Path) -> Tensor:
    """Of what has the shape of a concatenation, the entries that come from the argument at ``path``."""
    tensors, dim, place = done.args[0], done.bound()["dim"] % whole.ndim, int(path[1])
    start = sum(t.shape[dim] for t in tensors[:place] if t.ndim == whole.ndim)
    return whole.narrow(dim, start, tensors[place].shape[dim])


def _alive_cat(alive: Tensor | None, done: Done, path: Path) -> Tensor:
    mask = torch.zeros_like(done.result, dtype=torch.bool)
    part = _own_part(mask, done, path)
    if alive is None:
        part.fill_(True)  # of a number on the host a CUDA graph would refuse the copy
    else:
        part.copy_(alive)
    return mask


# unsqueeze and squeeze there are in place, where the shape is gone
enter(Adjoint(_reshaped, alive=_alive_reshaped, live=reshaped, neutral=True), aten.unsqueeze, aten.squeeze)
enter(
    Adjoint(_reshaped, alive=_alive_reshaped, live=reshaped, reads=(), neutral=True),
    *(aten.view.default, aten._unsafe_view, aten.alias),
)
enter(Adjoint(_reshaped, alive=_alive_reshaped, reads=(), neutral=True), aten._reshape_alias)
enter(Adjoint(_pull_copy, alive=_alive_reshaped, live=reshaped, neutral=True), aten.clone)
enter(Adjoint(_pull_copy, alive=_alive_reshaped, neutral=True), aten._to_copy, aten.lift_fresh)
enter(
    Adjoint(lambda delta, done, path: delta.t(), alive=_same_operation, live=turned(aten.t), neutral=True),
    aten.t.default,
)
enter(Adjoint(_pull_transpose, alive=_same_operation, live=turned(aten.transpose), neutral=True), aten.transpose.int)
enter(
    Adjoint(_pull_permute, alive=_same_operation, live=turned(aten.permute), reads=(), neutral=True),
    aten.permute.default,
)
enter(Adjoint(_pull_select, alive=_same_operation, live=part(aten.select), reads=(), picks=True), aten.select.int)
enter(Adjoint(_pull_slice, alive=_same_operation, live=part(aten.slice), reads=(), picks=True), aten.slice.Tensor)
enter(Adjoint(lambda delta, done, path: summed(delta, done.args[0]), reads=()), aten.expand)
enter(
    Adjoint(_pull_split, reads=(), parts=True),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.unsafe_split.Tensor),
)
enter(Adjoint(_own_part, alive=_alive_cat, paths=None), aten.cat.default)
enter(Adjoint(product=lambda delta, done, path: delta.select(done.bound()["dim"], int(path[1]))), aten.stack.default)
enter(Adjoint(product=lambda delta, done, path: summed(delta, done.args[1])), aten.copy.default)
