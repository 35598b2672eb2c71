"""How a derivative at the result of a small operation becomes one at its argument: no layer but norms.

``tail`` operations are pulled back through only behind the last layer, where the loss is; the others may also stand
between a layer and its injection site. Each is one call of arithmetic or of an aten kernel, on one operation's own
arguments: no graph is kept or walked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ad.jet import Operand, PairSet
from ..ad.registry import plan
from ..ad.rules.attention import KERNELS, added
from . import batch_norm
from .done import Done
from .watch import Path, at, functional, is_elementwise, replaced

__all__ = ["Done", "Local", "both", "find", "is_opaque", "own_part", "slope", "summed"]

aten = torch.ops.aten


Pull = Callable[[Any, Done, Path], Tensor]  # the derivative at the result, the operation, which argument
Alive = Callable[[Tensor | None, Done, Path], Tensor | None]


def _everywhere(alive: Tensor | None, done: Done, path: Path) -> Tensor | None:
    return None


@dataclass(frozen=True)
class Local:
    """What is known of an operation.

    ``alive`` takes a mask of where the argument may have a derivative to one of where the result may; None is
    everywhere, and a safe answer.
    """

    pull: Pull
    alive: Alive = _everywhere
    paths: tuple[Path, ...] | None = ((0,),)  # the arguments that it holds for; None: any
    tail: bool = False
    weights: bool = False  # a product with a layer's weight: pulled back through for what scales its input, only
    apart: bool = False  # not where an argument is a parameter: that is a layer
    parts: bool = False  # has several results; the derivative at it is a list, with None for those that nothing reads
    neutral: bool = False  # moves or copies entries, each of them once
    reads_input: bool = True  # or only its shape
    reads_result: bool = False


_TABLE: dict[Any, Local] = {}


def find(func: Any, path: Path | None) -> Local | None:
    """How to pull back through ``func`` to its argument at ``path``; None where that is not known."""
    if path is None:
        return None
    op = functional(func)
    local = _TABLE.get(op) or _TABLE.get(op.overloadpacket)
    if local is None and is_elementwise(op):
        local = _ELEMENTWISE
    return local if local is not None and (local.paths is None or path in local.paths) else None


def is_opaque(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation cannot be pulled back through after all: attention that drops weights does not say which."""
    if func not in KERNELS:
        return False
    return bool(_options(func, args, kwargs).get("dropout_p", 0.0) > 0)


def _enter(local: Local, *ops: Any) -> None:
    for op in ops:
        _TABLE[op] = local


def summed(delta: Tensor, like: Tensor) -> Tensor:
    """The derivative at an argument that was broadcast."""
    return delta.sum_to_size(like.shape) if delta.shape != like.shape else delta


# -- element by element -------------------------------------------------------------------------------------------


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
    if done.func is aten.mul.Tensor:
        other = done.args[1 - path[0]] if path[0] in (0, 1) else None
        if isinstance(other, Tensor) and other.shape == done.result.shape:  # a mask of dropout, or a gate
            return both(alive, other != 0)
    return alive


def both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Where both are alive."""
    return b if a is None else a if b is None else a & b


_ELEMENTWISE = Local(_pull_elementwise, _alive_elementwise, None)
# functions whose derivative is exactly zero on an interval
_FLAT = {aten.threshold, aten.hardtanh, aten.hardsigmoid, aten.hardswish, aten.hardshrink, aten.softshrink, aten.clamp,
         aten.clamp_min, aten.clamp_max}  # fmt: skip


def _pull_relu(delta: Tensor, done: Done, path: Path) -> Tensor:
    return aten.threshold_backward(delta, done.result, 0)


def _alive_relu(alive: Tensor | None, done: Done, path: Path) -> Tensor | None:
    return both(alive, done.result > 0)


_enter(Local(_pull_relu, _alive_relu, reads_input=False, reads_result=True), aten.relu)


def _pull_sum_of_two(delta: Tensor, done: Done, path: Path) -> Tensor:
    factor = 1 if path == (0,) else done.kwargs.get("alpha", done.args[2] if len(done.args) > 2 else 1)
    if done.func.overloadpacket is aten.sub and path == (1,):
        factor = -factor
    return summed(delta if factor == 1 else delta * factor, at(path, done.args, done.kwargs))


def _passes(alive: Tensor | None, done: Done, path: Path) -> Tensor | None:
    return alive if alive is None or alive.shape == done.result.shape else alive.expand(done.result.shape)


_enter(Local(_pull_sum_of_two, _passes, ((0,), (1,)), reads_input=False), aten.add.Tensor, aten.sub.Tensor)


def _pull_where(delta: Tensor, done: Done, path: Path) -> Tensor:
    condition = done.args[0] if path == (1,) else ~done.args[0]
    return summed(torch.where(condition, delta, 0.0), at(path, done.args, done.kwargs))


def _alive_where(alive: Tensor | None, done: Done, path: Path) -> Tensor | None:
    condition = done.args[0] if path == (1,) else ~done.args[0]
    return both(_passes(alive, done, path), condition.expand(done.result.shape))


_enter(Local(_pull_where, _alive_where, ((1,), (2,))), aten.where.self)
_enter(
    Local(
        lambda delta, done, path: summed(delta.masked_fill(done.args[1], 0), done.args[0]),
        lambda alive, done, path: both(_passes(alive, done, path), ~done.args[1].expand(done.result.shape)),
    ),
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
)
_enter(
    Local(
        lambda delta, done, path: _through_dropout(delta, done),
        lambda alive, done, path: alive if done.args[2] is False else both(alive, done.out[1]),
    ),
    aten.native_dropout.default,
)


def _through_dropout(delta: Tensor, done: Done) -> Tensor:
    _, p, train = done.args
    return delta if train is False else delta * done.out[1] * (0.0 if p == 1 else 1 / (1 - p))


# -- entries moved, copied or left out ----------------------------------------------------------------------------


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


_enter(  # which there are in place, where the shape is gone
    Local(_reshaped, _alive_reshaped, neutral=True), aten.unsqueeze, aten.squeeze
)
_enter(
    Local(_reshaped, _alive_reshaped, neutral=True, reads_input=False),
    *(aten.view.default, aten._unsafe_view, aten._reshape_alias, aten.alias),
)
_enter(Local(lambda delta, done, path: delta.t(), _same_operation, neutral=True), aten.t.default)
_enter(
    Local(lambda delta, done, path: delta.transpose(*done.args[1:]), _same_operation, neutral=True), aten.transpose.int
)
_enter(Local(_pull_permute, _same_operation, neutral=True, reads_input=False), aten.permute.default)
_enter(Local(_pull_copy, _alive_reshaped, neutral=True), aten.clone, aten._to_copy, aten.lift_fresh)
_enter(
    Local(
        lambda delta, done, path: aten.select_backward(delta, done.args[0].shape, *done.args[1:]),
        _same_operation,
        reads_input=False,
    ),
    aten.select.int,
)


def _pull_slice(delta: Tensor, done: Done, path: Path) -> Tensor:
    x, dim, start, stop, step = done.bound().values()
    size = x.shape[dim]
    start, stop = (0 if start is None else start), (size if stop is None else min(stop, size))
    return aten.slice_backward(delta, x.shape, dim, start, stop, step)


_enter(Local(_pull_slice, _same_operation, reads_input=False), aten.slice.Tensor)
_enter(Local(lambda delta, done, path: summed(delta, done.args[0]), reads_input=False), aten.expand)


def _pull_split(deltas: list[Tensor | None], done: Done, path: Path) -> Tensor:
    parts = [torch.zeros_like(out) if d is None else d for d, out in zip(deltas, done.out, strict=True)]
    dim = done.bound()["dim"]
    return torch.stack(parts, dim) if done.func is aten.unbind.int else torch.cat(parts, dim)


_enter(
    Local(_pull_split, parts=True, reads_input=False),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.unsafe_split.Tensor),
)


def own_part(whole: Tensor, done: Done, path: Path) -> Tensor:
    """Of what has the shape of a concatenation, the entries that come from the argument at ``path``."""
    tensors, dim, place = done.args[0], done.bound()["dim"] % whole.ndim, int(path[1])
    start = sum(t.shape[dim] for t in tensors[:place] if t.ndim == whole.ndim)
    return whole.narrow(dim, start, tensors[place].shape[dim])


def _alive_cat(alive: Tensor | None, done: Done, path: Path) -> Tensor:
    mask = torch.zeros_like(done.result, dtype=torch.bool)
    part = own_part(mask, done, path)
    if alive is None:
        part.fill_(True)  # of a number on the host a CUDA graph would refuse the copy
    else:
        part.copy_(alive)
    return mask


_enter(Local(own_part, _alive_cat, None), aten.cat.default)

# -- pooling ------------------------------------------------------------------------------------------------------


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


_enter(Local(_pull_max_pool, _alive_maxima), aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
_enter(
    Local(_pull_adaptive_max_pool, _alive_maxima), aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default
)
_enter(
    Local(_pull_mean_pool, _alive_means),
    *(aten.avg_pool2d.default, aten.avg_pool3d.default),
    *(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default),
)
_enter(Local(_pull_reduction, _alive_reduction), aten.mean.dim, aten.sum.dim_IntList)
_enter(Local(_pull_reduction, tail=True), aten.mean.default, aten.sum.default)

# -- norms --------------------------------------------------------------------------------------------------------

_enter(Local(batch_norm.pull), *batch_norm.OPERATIONS)


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


_enter(Local(_pull_layer_norm), aten.native_layer_norm.default)
_enter(Local(_pull_group_norm), aten.native_group_norm.default)
_enter(Local(_pull_rms_norm), aten._fused_rms_norm.default)

# -- losses -------------------------------------------------------------------------------------------------------


def _pull_softmax(delta: Tensor, done: Done, path: Path) -> Tensor:
    backward = getattr(aten, done.func.overloadpacket.__name__ + "_backward_data")
    x, dim = done.args[:2]
    return backward(delta, done.result, dim, x.dtype)


def _pull_nll(delta: Tensor, done: Done, path: Path) -> Tensor:
    backward = aten.nll_loss2d_backward if "2d" in done.func.overloadpacket.__name__ else aten.nll_loss_backward
    return backward(delta.contiguous(), *done.args, done.out[1])


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


_enter(Local(_pull_softmax, tail=True, reads_result=True), aten._log_softmax)
_enter(Local(_pull_softmax, reads_result=True), aten._softmax)
_enter(
    Local(
        lambda delta, done, path: aten._softmax_backward_data(delta, done.result, done.args[1], done.args[0].dtype),
        reads_result=True,
    ),
    aten._safe_softmax,
)
_enter(Local(_pull_nll, tail=True), aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_enter(Local(_pull_gather, tail=True), aten.gather)
_enter(Local(_pull_logsumexp, tail=True, reads_result=True), aten.logsumexp)

# -- attention ----------------------------------------------------------------------------------------------------


def _options(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(zip(KERNELS[func], args[3:], strict=False)) | kwargs


def _pull_attention(delta: Tensor, done: Done, path: Path) -> Tensor:
    """With p = softmax(scale q k^T + bias) and y = p v; some heads at a time, for p is as large as the square of L."""
    options = _options(done.func, done.args, done.kwargs)
    query, key, value = done.args[:3]
    shared = query.shape[-3] // key.shape[-3]  # heads that read the same keys
    factor = options.get("scale")
    factor = query.shape[-1] ** -0.5 if factor is None else factor
    bias = options.get("attn_bias", options.get("attn_mask"))
    parts = []
    for head in range(query.shape[-3]):
        q, k, v, y = query[:, head], key[:, head // shared], value[:, head // shared], delta[:, head]
        scores = factor * q @ k.mT
        mask = added(bias, scores, options.get("is_causal", False))
        p = aten._safe_softmax(scores + (mask if mask.ndim < 3 else _of_head(mask, head)), -1)
        if path == (2,):
            parts.append(p.mT @ y)
            continue
        inner = y @ v.mT
        slopes = factor * p * (inner - (inner * p).sum(-1, keepdim=True))
        parts.append(slopes @ k if path == (0,) else slopes.mT @ q)
    out = torch.stack(parts, 1)
    if path != (0,) and shared > 1:
        out = out.unflatten(1, (-1, shared)).sum(2)
    return out.reshape(done.args[int(path[0])].shape)


def _of_head(mask: Tensor, head: int) -> Tensor:
    """Of a mask (..., H, L, S), where H may be 1."""
    return mask.select(-3, head if mask.shape[-3] > 1 else 0)


_enter(Local(_pull_attention, paths=((0,), (1,), (2,))), *KERNELS)


def _pull_product(delta: Tensor, done: Done, path: Path) -> Tensor:
    left, right = done.args[:2]
    return delta @ right.mT if path == (0,) else left.mT @ delta


_enter(Local(_pull_product, paths=((0,), (1,)), apart=True), aten.bmm.default)

# -- the product with a layer's weight ----------------------------------------------------------------------------


def _pull_addmm(delta: Tensor, done: Done, path: Path) -> Tensor:
    return delta @ done.args[2].mT * done.kwargs.get("alpha", 1)


_enter(Local(_pull_product, paths=((0,),), weights=True), aten.mm.default)
_enter(Local(_pull_addmm, paths=((1,),), weights=True), aten.addmm.default)
