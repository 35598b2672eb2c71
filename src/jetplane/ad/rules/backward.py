"""Rules of the operations that autograd calls, for programs that differentiate inside themselves.

Most backward operations are programs in torch's own table; here stand those that it lacks, or has wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import MissingRule
from ..algebra.families import composite, jet_rule, primal_of
from ..algebra.jet import Operand, PairSet
from ..algebra.registry import argument_names
from .attention import added, refuse_dropout
from .layers import RESIZES, bag_sums, distances, folded, pairwise_distances, sample
from .losses import ctc, multilabel_margins

aten = torch.ops.aten
_NONE, _MEAN, _SUM = range(3)

# -- activations --------------------------------------------------------------------------------------------------


def _silu(grad: Tensor, x: Tensor) -> Tensor:
    s = x.sigmoid()
    return grad * s * (1 + x * (1 - s))


def _mish(grad: Tensor, x: Tensor) -> Tensor:
    t = torch.nn.functional.softplus(x).tanh()
    return grad * (t + x * x.sigmoid() * (1 - t * t))


composite(aten.silu_backward, _silu)
composite(aten.mish_backward, _mish)
composite(aten.log_sigmoid_backward, lambda grad, x, buffer: grad * (-x).sigmoid())
composite(aten.hardshrink_backward, lambda grad, x, limit: torch.where(x.abs() > limit, grad, 0.0))
composite(aten.softshrink_backward, lambda grad, x, limit: torch.where(x.abs() > limit, grad, 0.0))

# -- resizing, pooling and padding: linear in the gradient, the row axis folded into the batch --------------------

for _space, _names in RESIZES.items():
    for _name in _names:
        folded(getattr(aten, f"{_name}_backward").default, _space, sizes_at=2)


def _folded_like(op: Any, space: int) -> None:
    """An operation linear in the gradient that takes of its second argument, the layer's input, the shape alone."""

    @jet_rule(op, "linear")
    def rule(pairs: PairSet, op: Any, grad: Any, x: Any, *args: Any) -> Any:
        y = op(primal_of(grad), primal_of(x), *args)
        if not isinstance(grad, Operand):
            return y

        def lift(rows: Tensor | None) -> Tensor | None:
            if rows is None:
                return None
            like = y.new_zeros(()).expand(rows.shape[0], *y.shape)
            if rows.ndim == space + 2:
                return op(rows, like, *args)
            return op(rows.flatten(0, 1), like.flatten(0, 1), *args).unflatten(0, rows.shape[:2])

        return Operand(y, lift(grad.tangent), lift(grad.second))


for _op, _space in (
    (aten.avg_pool2d_backward, 2), (aten.avg_pool3d_backward, 3),
    (aten._adaptive_avg_pool2d_backward, 2), (aten._adaptive_avg_pool3d_backward, 3),
    (aten.replication_pad1d_backward, 1), (aten.replication_pad2d_backward, 2), (aten.replication_pad3d_backward, 3),
):  # fmt: skip
    _folded_like(_op.default, _space)


def _scattered(op: Any, space: int) -> None:
    """The gradient of a maximum: added where the values came from. The last argument holds the indices."""

    @jet_rule(op, "linear")
    def rule(pairs: PairSet, op: Any, grad: Any, x: Any, *args: Any) -> Any:
        y = op(primal_of(grad), primal_of(x), *args)
        if not isinstance(grad, Operand):
            return y
        at = args[-1].flatten(-space)

        def lift(rows: Tensor | None) -> Tensor | None:
            if rows is None:
                return None
            plane = rows.new_zeros((rows.shape[0], *y.shape)).flatten(-space)
            plane = plane.scatter_add(-1, at.expand(rows.shape[0], *at.shape), rows.flatten(-space))
            return plane.unflatten(-1, y.shape[-space:])

        return Operand(y, lift(grad.tangent), lift(grad.second))


for _op, _space in (
    (aten.max_pool2d_with_indices_backward, 2), (aten.max_pool3d_with_indices_backward, 3),
    (aten.adaptive_max_pool2d_backward, 2), (aten.adaptive_max_pool3d_backward, 3),
    (aten.fractional_max_pool2d_backward, 2), (aten.fractional_max_pool3d_backward, 3),
):  # fmt: skip
    _scattered(_op.default, _space)

# -- convolution --------------------------------------------------------------------------------------------------


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    for_x = for_weight = for_bias = None
    stride, padding, dilation = (_full(values, x.ndim - 2) for values in (stride, padding, dilation))
    if output_mask[0]:
        extra = [0] * len(stride)
        if not transposed:  # what the stride cut off at the end
            spans = zip(x.shape[2:], grad.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True)
            extra = [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, s, p, d, k in spans]
        for_x = torch.convolution(grad, weight, None, stride, padding, dilation, not transposed, extra, groups)
    if output_mask[1]:
        big, small = (grad, x) if transposed else (x, grad)
        for_weight = _correlate(big, small, weight.shape[2:], stride, padding, dilation, groups)
    if output_mask[2]:
        for_bias = grad.sum([d for d in range(grad.ndim) if d != 1])
    return for_x, for_weight, for_bias


def _full(values: list[int], space: int) -> list[int]:
    return list(values) * space if len(values) == 1 else list(values)


def _correlate(
    big: Tensor, small: Tensor, kernel: Any, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    """The weight's gradient, (small channels, big channels / groups, *kernel): examples take the place of channels."""
    inputs = big.unflatten(1, (groups, -1)).permute(2, 1, 0, *range(3, big.ndim + 1)).flatten(1, 2)
    filters = small.movedim(0, 1)
    y = torch.convolution(inputs, filters, None, dilation, padding, stride, False, [0] * len(stride), groups)
    for axis, size in enumerate(kernel):
        y = y.narrow(2 + axis, 0, size)
    return y.movedim(0, 1)


composite(aten.convolution_backward, _convolution_backward)

# -- recurrent cells: from the activated gates that the cell saved ------------------------------------------------


def _lstm_cell(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    grad_hy = torch.zeros_like(cx) if grad_hy is None else grad_hy
    i, f, g, o = workspace.chunk(4, 1)
    t = cy.tanh()
    inner = grad_hy * o * (1 - t * t)
    inner = inner if grad_cy is None else inner + grad_cy
    gates = torch.cat(
        [
            inner * g * i * (1 - i),
            inner * cx * f * (1 - f),
            inner * i * (1 - g * g),
            grad_hy * t * o * (1 - o),
        ],
        1,
    )
    return gates, inner * f, gates.sum(0) if has_bias else None


def _gru_cell(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Any, ...]:
    r, i, n, hx, hn = workspace.chunk(5, 1)
    new = grad * (1 - i) * (1 - n * n)
    update = grad * (hx - n) * i * (1 - i)
    reset = new * hn * r * (1 - r)
    inputs, hidden = torch.cat([reset, update, new], 1), torch.cat([reset, update, new * r], 1)
    biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return inputs, hidden, grad * i, *biases


composite(aten._thnn_fused_lstm_cell_backward_impl, _lstm_cell)
composite(aten._thnn_fused_gru_cell_backward, _gru_cell)

# -- rare ones: autograd through the same program as the forward rule ---------------------------------------------


def _pulled_back(function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor, mask: Any = None) -> tuple[Any, ...]:
    """grad^T times the derivative of ``function`` at each input, None where ``mask`` is false."""
    wanted = [True] * len(inputs) if mask is None else list(mask)
    # the operation and not the method: a fresh leaf that keeps its tangents
    leaves = [aten.detach(x).requires_grad_(need) for x, need in zip(inputs, wanted, strict=True)]
    with torch.enable_grad():
        y = function(*leaves)
        active = [leaf for leaf in leaves if leaf.requires_grad]
        # with a graph, for without one it would be a constant to the passes that follow the rule
        options = {"create_graph": True, "materialize_grads": True}
        found = iter(torch.autograd.grad(y, active, grad, **options) if active else ())
    return tuple(next(found) if need else None for need in wanted)


def _grid_sampler(
    grad: Tensor, x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool, output_mask: Any = None
) -> Any:
    return _pulled_back(lambda a, b: sample(a, b, mode, padding, align_corners), grad, x, grid, mask=output_mask)


composite(aten.grid_sampler_2d_backward, _grid_sampler)
composite(aten.grid_sampler_3d_backward, _grid_sampler)
composite(aten._grid_sampler_2d_cpu_fallback_backward, _grid_sampler)
composite(aten.cudnn_grid_sampler_backward, lambda x, grid, grad: _grid_sampler(grad, x, grid, 0, 0, True))
composite(aten._cdist_backward, lambda grad, a, b, p, value: _pulled_back(lambda x: distances(x, b, p), grad, a)[0])
composite(aten._pdist_backward, lambda grad, x, p, value: _pulled_back(lambda a: pairwise_distances(a, p), grad, x)[0])


def _weight_norm(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> Any:
    others = [d for d in range(v.ndim) if d != dim % v.ndim]
    inner = (grad * v).sum(others, keepdim=True)
    return g / norms * (grad - v * inner / (norms * norms)), inner / norms


composite(aten._weight_norm_interface_backward, _weight_norm)


def _embedding_bag(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bags: Tensor,
    sizes: Tensor,
    chosen: Tensor,
    count: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    scales: Tensor | None,
    padding_idx: int = -1,
) -> Tensor:
    if scale_grad_by_freq or sparse:
        raise MissingRule("embedding_bag has no rule for sparse or frequency-scaled gradients", "embedding_bag")
    zeros = grad.new_zeros((count, grad.shape[1]))
    if mode == 2:
        filled = (sizes[: len(grad)] > 0).unsqueeze(-1)
        return zeros.scatter_add(0, torch.where(filled, chosen.long(), 0), torch.where(filled, grad, 0.0))
    return _pulled_back(
        lambda weight: bag_sums(weight, indices, offsets, len(grad), mode, scales, padding_idx), grad, zeros
    )[0]


def _embedding_bag_scales(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, bags: Tensor, mode: int, padding_idx: int = -1
) -> Tensor:
    ones = grad.new_ones(indices.shape)
    return _pulled_back(
        lambda scales: bag_sums(weight, indices, offsets, len(grad), mode, scales, padding_idx), grad, ones
    )[0]


composite(aten._embedding_bag_backward, _embedding_bag)
composite(aten._embedding_bag_per_sample_weights_backward, _embedding_bag_scales)

# -- attention ----------------------------------------------------------------------------------------------------


def _attention(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key, value and bias, from the scores once more."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    shared = query.shape[-3] // key.shape[-3]
    keys, values = (x if shared == 1 else x.repeat_interleave(shared, -3) for x in (key, value))
    scores = query @ keys.mT * factor
    p = aten._safe_softmax(scores + added(bias, scores.detach(), causal), -1)
    slope = grad @ values.mT
    slope = p * (slope - (p * slope).sum(-1, keepdim=True))
    for_key, for_value = slope.mT @ query * factor, p.mT @ grad
    if shared > 1:
        for_key, for_value = (x.unflatten(-3, (-1, shared)).sum(-3) for x in (for_key, for_value))
    return slope @ keys * factor, for_key, for_value, None if bias is None else slope.sum_to_size(bias.shape)


def _kernel(op: Any) -> None:
    """The backward of a fused kernel, whatever the order of its arguments."""
    names = argument_names(op)

    def body(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        refuse_dropout(op, given["dropout_p"])
        bias = given.get("attn_bias", given.get("attn_mask"))
        operands = (args[0], given["query"], given["key"], given["value"])
        found = _attention(*operands, bias, given.get("is_causal", False), given.get("scale"))
        wanted = given.get("grad_input_mask")
        return found[:3] if wanted is None else tuple(g if w else None for g, w in zip(found, wanted, strict=True))

    composite(op, body)


_kernel(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
_kernel(aten._scaled_dot_product_flash_attention_backward.default)
_kernel(aten._scaled_dot_product_efficient_attention_backward.default)
_kernel(aten._scaled_dot_product_cudnn_attention_backward.default)

# -- losses -------------------------------------------------------------------------------------------------------


def _per_example(grad: Tensor, reduction: int, count: int) -> Tensor:
    return grad.reshape(-1) if reduction == _NONE else grad.reshape(1) / (count if reduction == _MEAN else 1)


def _multi_margin(
    grad: Tensor, x: Tensor, target: Tensor, p: Any, margin: Any, weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    scores, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1, 1)
    gaps = margin - scores.gather(1, labels) + scores
    slope = torch.where(gaps > 0, 1.0 if p == 1 else 2 * gaps, 0.0).scatter(1, labels, 0.0) / x.shape[-1]
    slope = slope if weight is None else slope * weight[labels]
    slope = slope * _per_example(grad, reduction, len(scores)).unsqueeze(1)
    return slope.scatter(1, labels, -slope.sum(1, keepdim=True)).reshape(x.shape)


def _multilabel_margin(grad: Tensor, x: Tensor, target: Tensor, reduction: int, is_target: Tensor) -> Tensor:
    scores = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    each = _per_example(grad, reduction, len(scores)).expand(len(scores))
    return _pulled_back(lambda a: multilabel_margins(a, target)[0], each, scores)[0].reshape(x.shape)


composite(aten.multi_margin_loss_backward, _multi_margin)
composite(aten.multilabel_margin_loss_backward, _multilabel_margin)


def _ctc_loss(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    loss: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> Tensor:
    each = grad.reshape(-1).expand(log_probs.shape[1] if log_probs.ndim == 3 else 1)
    pulled = _pulled_back(lambda x: ctc(x, targets, input_lengths, target_lengths, blank), each, log_probs)[0]
    # torch's is the derivative by what the probabilities are a softmax of: it adds them at each step of the input
    steps = torch.arange(log_probs.shape[0], device=log_probs.device).reshape(-1, *[1] * (log_probs.ndim - 1))
    lengths = torch.as_tensor(input_lengths, device=log_probs.device).reshape(*[-1] * (log_probs.ndim - 2), 1)
    scale = each.reshape(lengths.shape) if log_probs.ndim == 3 else each
    pulled = pulled + torch.where(steps < lengths, log_probs.exp() * scale, 0.0)
    lost = (
        torch.isinf(loss.detach()).reshape(lengths.shape)
        if zero_infinity
        else torch.zeros_like(steps, dtype=torch.bool)
    )
    return torch.where(lost, 0.0, pulled)


composite(aten._ctc_loss_backward.default, _ctc_loss)
composite(aten._ctc_loss_backward.Tensor, _ctc_loss)
