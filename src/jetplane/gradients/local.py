"""The local products: what a layer's own input and the derivative at its output give for its parameters.

Each is an aten kernel of a weight's gradient or a line of arithmetic, on one operation's own arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ad.locate import call_site
from ..errors import MissingRule
from . import batch_norm
from .done import Done
from .pullback import own_part, slope, summed
from .watch import Path, at, functional, is_elementwise

__all__ = ["check", "is_scale", "product"]

aten = torch.ops.aten
Product = Callable[[Tensor, Done, Path], Tensor]  # the derivative at the result, the operation, which argument

_TABLE: dict[Any, Product] = {}


def _enter(*ops: Any) -> Callable[[Product], Product]:
    def enter(product: Product) -> Product:
        for op in ops:
            _TABLE[op] = product
        return product

    return enter


def _lookup(func: Any) -> Product | None:
    op = functional(func)
    found = _TABLE.get(op) or _TABLE.get(op.overloadpacket)
    return _elementwise if found is None and is_elementwise(op) else found


def check(func: Any, names: str) -> None:
    """Raise if the gradient of a parameter of ``func`` is not known."""
    if _lookup(func) is None:
        raise MissingRule(
            f"{func} has no local product for its parameter {names}, {call_site('called')}; expected a linear layer, "
            "convolution, embedding, normalisation or elementwise operation.",
            str(func),
        )


def is_scale(func: Any) -> bool:
    """Whether the parameters of ``func`` scale and shift, entry by entry: those of a norm, or of arithmetic."""
    return _lookup(func) in (_elementwise, _layer_norm, _group_norm, _rms_norm, _batch_norm)


def product(delta: Tensor, done: Done, path: Path) -> Tensor:
    """The gradient of the parameter at ``path``."""
    found = _lookup(done.func)
    assert found is not None
    return found(delta, done, path)


def _elementwise(delta: Tensor, done: Done, path: Path) -> Tensor:
    parameter = at(path, done.args, done.kwargs)
    factor = slope(done, path)
    return torch.zeros_like(parameter) if factor is None else summed(delta * factor, parameter)


# -- products -----------------------------------------------------------------------------------------------------


def _factor(delta: Tensor, left: Tensor, right: Tensor, which: int) -> Tensor:
    return delta @ right.mT if which == 0 else left.mT @ delta


@_enter(aten.mm.default, aten.bmm.default)
def _mm(delta: Tensor, done: Done, path: Path) -> Tensor:
    left, right = done.args
    return _factor(delta, left, right, int(path[0]))


@_enter(aten.addmm.default, aten.baddbmm.default)
def _addmm(delta: Tensor, done: Done, path: Path) -> Tensor:
    bias, left, right = done.args[:3]
    beta, alpha = done.kwargs.get("beta", 1), done.kwargs.get("alpha", 1)
    if path == (0,):
        return summed(delta if beta == 1 else beta * delta, bias)
    gradient = _factor(delta, left, right, int(path[0]) - 1)
    return gradient if alpha == 1 else alpha * gradient


@_enter(aten.mv.default)
def _mv(delta: Tensor, done: Done, path: Path) -> Tensor:
    matrix, vector = done.args
    return torch.outer(delta, vector) if path == (0,) else matrix.T @ delta


@_enter(aten.dot.default)
def _dot(delta: Tensor, done: Done, path: Path) -> Tensor:
    return delta * done.args[1 - int(path[0])]


@_enter(aten.convolution.default, aten._convolution.default)
def _convolution(delta: Tensor, done: Done, path: Path) -> Tensor:
    x, weight, bias, *options = done.args
    unbatched = x.ndim == len(options[0]) + 1
    if path == (2,):
        return delta.sum([axis for axis in range(delta.ndim) if axis != (0 if unbatched else 1)])
    if unbatched:
        delta, x = delta.unsqueeze(0), x.unsqueeze(0)
    sizes = None if bias is None else list(bias.shape)
    return aten.convolution_backward(delta, x, weight, sizes, *options[:6], [False, True, False])[1]


# -- look-up ------------------------------------------------------------------------------------------------------


@_enter(aten.embedding.default)
def _embedding(delta: Tensor, done: Done, path: Path) -> Tensor:
    weight, indices, padding, scale, _ = done.bound().values()
    return aten.embedding_dense_backward(delta, indices, weight.shape[0], padding, scale)


@_enter(aten.index_select.default)
def _index_select(delta: Tensor, done: Done, path: Path) -> Tensor:
    parameter, dim, index = done.args
    return torch.zeros_like(parameter).index_add_(dim, index, delta)


@_enter(aten.gather.default)
def _gather(delta: Tensor, done: Done, path: Path) -> Tensor:
    parameter, dim, index = done.args[:3]
    return torch.zeros_like(parameter).scatter_add_(dim, index, delta)


@_enter(aten.index.Tensor)
def _index(delta: Tensor, done: Done, path: Path) -> Tensor:
    parameter, indices = done.args
    return aten.index_put(torch.zeros_like(parameter), indices, delta, True)


_enter(aten.cat.default)(own_part)


@_enter(aten.stack.default)
def _stack(delta: Tensor, done: Done, path: Path) -> Tensor:
    return delta.select(done.bound()["dim"], int(path[1]))


@_enter(aten.copy.default)
def _copy(delta: Tensor, done: Done, path: Path) -> Tensor:
    return summed(delta, done.args[1])


@_enter(aten.where.self)
def _where(delta: Tensor, done: Done, path: Path) -> Tensor:
    condition = done.args[0] if path == (1,) else ~done.args[0]
    return summed(torch.where(condition, delta, 0.0), at(path, done.args, done.kwargs))


# -- normalisation ------------------------------------------------------------------------------------------------


@_enter(aten.native_layer_norm.default)
def _layer_norm(delta: Tensor, done: Done, path: Path) -> Tensor:
    x, shape, weight, bias, _ = done.args
    _, mean, rstd = done.out
    mask = [False, path == (2,), path == (3,)]
    parts = aten.native_layer_norm_backward(delta.contiguous(), x, shape, mean, rstd, weight, bias, mask)
    return parts[1] if path == (2,) else parts[2]


@_enter(aten.native_group_norm.default)
def _group_norm(delta: Tensor, done: Done, path: Path) -> Tensor:
    x, _, _, n, c, space, groups, _ = done.args
    shaped = delta.reshape(n, groups, c // groups, space)
    if path == (2,):
        return shaped.sum((0, 3)).flatten()
    _, mean, rstd = (one.reshape(n, groups, 1, 1) if one.ndim == 2 else one for one in done.out)
    return (shaped * (x.reshape(shaped.shape) - mean) * rstd).sum((0, 3)).flatten()


@_enter(aten._fused_rms_norm.default)
def _rms_norm(delta: Tensor, done: Done, path: Path) -> Tensor:
    x, shape = done.args[:2]
    return (delta * x * done.out[1]).to(x.dtype).sum_to_size(*shape)


@_enter(*batch_norm.OPERATIONS)
def _batch_norm(delta: Tensor, done: Done, path: Path) -> Tensor:
    axes = [axis for axis in range(delta.ndim) if axis != 1]
    return (delta if path == (2,) else delta * batch_norm.normalised(done)).sum(axes)
