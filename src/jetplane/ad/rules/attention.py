"""Rules of the fused kernels of scaled dot product attention; the unfused one is a program that the engine follows.

With scores s = scale q k^T + bias, p = softmax(s), and c_i = s_i - <p, s_i>:

    logsumexp   l_i = <p, s_i>    l_ij = <p, s_ij> + <p, c_i c_j>
    p           p_i = p c_i       p_ij = p (c_i c_j + s_ij - l_ij)
    output      p v, a product
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedProgram
from ..algebra.families import chain, jet_rule, primal_of, primals_of, product, total
from ..algebra.jet import Operand, PairSet
from .products import MatMul

aten = torch.ops.aten


def _each(function: Any, x: Any) -> Any:
    """A function linear in x that leaves leading axes alone, of a value or of a jet."""
    if not isinstance(x, Operand):
        return function(x)
    return Operand(function(x.primal), *(None if rows is None else function(rows) for rows in (x.tangent, x.second)))


def _scale(query: Any, scale: float | None) -> float:
    return 1 / math.sqrt(primal_of(query).shape[-1]) if scale is None else scale


def _heads(x: Any, like: Any) -> Any:
    """Grouped-query attention: keys and values repeated for the heads that share them."""
    have, want = primal_of(x).shape[-3], primal_of(like).shape[-3]
    return x if have == want else _each(lambda rows: rows.repeat_interleave(want // have, -3), x)


def _scores(pairs: PairSet, query: Any, key: Any, bias: Any, causal: bool, scale: float | None) -> Any:
    factor = _scale(query, scale)
    scaled, turned = _each(lambda rows: rows * factor, query), _each(lambda rows: rows.mT, key)
    s = primal_of(scaled) @ primal_of(turned)
    jet = product(pairs, s, MatMul(), scaled, turned)
    value = s + added(primal_of(bias), s, causal)
    return chain(pairs, value, [jet, bias], [1, 1], {})


def added(bias: Tensor | None, scores: Tensor, causal: bool) -> Tensor:
    """What a mask adds to the scores."""
    zero = scores.new_zeros(())
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.where(bias, zero, -math.inf)
    if not causal:
        return zero if bias is None else bias
    allowed = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    mask = torch.where(allowed, zero, -math.inf)
    return mask if bias is None else bias + mask


def _attention(
    pairs: PairSet, y: Tensor, query: Any, key: Any, value: Any, bias: Any, causal: bool, scale: Any, dropout: float
) -> Any:
    """The jets of the output ``y`` and of the logsumexp (..., L). With dropout, y is made here of one draw."""
    key, value = _heads(key, query), _heads(value, query)
    s = _scores(pairs, query, key, bias, causal, scale)
    p = aten._safe_softmax(s.primal, -1)  # zero, not nan, where a mask leaves nothing
    level = s.primal.logsumexp(-1, keepdim=True)

    def mean(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else (p * rows).sum(-1, keepdim=True)

    c = products = p2 = None
    l1, l2 = mean(s.tangent), mean(s.second)
    if s.tangent is not None and l1 is not None:
        c = s.tangent - l1
        products = pairs.outer(c, c) if pairs.rows else None
        l2 = total((l2, mean(products)))
    if l2 is not None:
        p2 = p * (total((products, s.second)) - l2)  # type: ignore[operator]
    weights = Operand(p, None if c is None else p * c, p2)
    if dropout > 0:
        kept = torch.nn.functional.dropout(torch.ones_like(p), dropout)
        weights = _each(lambda rows: rows * kept, weights)
        y = weights.primal @ primal_of(value)
    rows = [None if r is None else r.squeeze(-1) for r in (l1, l2)]
    return product(pairs, y, MatMul(), weights, value), Operand(level.squeeze(-1), *rows)


def _like(y: Tensor | None, jet: Operand) -> Any:
    """The rows of a logsumexp for the kernel's own, which may be padded along the queries, or left out."""
    if y is None or y.numel() == 0:
        return y
    count = jet.primal.numel()
    if y.numel() == count:
        return Operand(y, *(None if r is None else r.reshape(r.shape[0], *y.shape) for r in (jet.tangent, jet.second)))
    extra = y.shape[-1] - jet.primal.shape[-1]
    return Operand(
        y, *(None if r is None else torch.nn.functional.pad(r, (0, extra)) for r in (jet.tangent, jet.second))
    )


def _kernel(op: Any, names: tuple[str, ...]) -> None:
    """A fused kernel whose arguments behind query, key and value are ``names``, and its first outputs y, logsumexp."""

    @jet_rule(op, "attention")
    def rule(pairs: PairSet, op: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        options = dict(zip(names, args, strict=False)) | kwargs
        dropout = options.get("dropout_p", 0.0)
        if dropout > 0:  # what a fused kernel drops cannot be seen, so the weights are dropped outside of it
            args = tuple(0.0 if name == "dropout_p" else a for name, a in zip(names, args, strict=False))
            kwargs = kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {})
        causal, bias = options.get("is_causal", False), options.get("attn_bias", options.get("attn_mask"))
        if causal and primal_of(query).shape[-2] != primal_of(key).shape[-2] and op in _SQUARE:
            raise UnsupportedProgram(f"{op} is causal with queries and keys of different lengths; expected equal ones.")
        y, level, *others = op(*primals_of((query, key, value, *args)), **primals_of(kwargs))
        out, level_jet = _attention(pairs, y, query, key, value, bias, causal, options.get("scale"), dropout)
        return out, _like(level, level_jet), *others


def refuse_dropout(op: Any, p: float) -> None:
    """The backward of a fused kernel with dropout has no rule, for what it drops cannot be seen."""
    if p > 0:
        raise UnsupportedProgram(
            f"{op} drops attention weights (dropout_p = {p}) that cannot be seen from outside; expected the math "
            "backend, torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or dropout_p = 0."
        )


_SQUARE = (aten._scaled_dot_product_flash_attention.default,)  # torch selects it for such lengths never
_FLAGS = ("dropout_p", "is_causal", "return_debug_mask")
KERNELS = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: ("dropout_p", "is_causal"),
    aten._scaled_dot_product_flash_attention.default: _FLAGS,
    aten._scaled_dot_product_efficient_attention.default: ("attn_bias", "compute_log_sumexp", *_FLAGS[:2]),
    aten._scaled_dot_product_cudnn_attention.default: ("attn_bias", "compute_log_sumexp", *_FLAGS),
    aten._scaled_dot_product_fused_attention_overrideable.default: ("attn_bias", *_FLAGS),
}
for _op, _names in KERNELS.items():
    _kernel(_op, _names)


def options_of(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """What a kernel is given behind query, key and value, by name."""
    return dict(zip(KERNELS[func], args[3:], strict=False)) | kwargs


def bias_of(options: dict[str, Any]) -> Tensor | None:
    """What is added to the scores, or tells which of them count."""
    bias: Tensor | None = options.get("attn_bias", options.get("attn_mask"))
    return bias


def drops(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a kernel drops weights at random, and does not say which."""
    return bool(options_of(func, args, kwargs).get("dropout_p", 0.0) > 0)
