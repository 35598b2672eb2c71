"""The fused kernels of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ad.rules.attention import KERNELS, added, bias_of, drops, options_of
from ..program.done import Done
from ..program.watch import Path
from .adjoint import Adjoint, enter
from .entry_maps import rows

aten = torch.ops.aten


def _pull_attention(delta: Tensor, done: Done, path: Path) -> Tensor:
    """With p = softmax(scale q k^T + bias) and y = p v; some heads at a time, for p is as large as the square of L."""
    options = options_of(done.func, done.args, done.kwargs)
    query, key, value = done.args[:3]
    shared = query.shape[-3] // key.shape[-3]  # heads that read the same keys
    factor = options.get("scale")
    factor = query.shape[-1] ** -0.5 if factor is None else factor
    bias = bias_of(options)
    parts = []
    for head in range(query.shape[-3]):
        q, k, v, y = query[:, head], key[:, head // shared], value[:, head // shared], delta[:, head]
        scores = factor * q @ k.mT
        mask = added(bias, scores, options.get("is_causal", False))
        p = aten._safe_softmax(scores + (mask if mask.ndim < 3 else _of_head(mask, head)), -1)
        if path == (2,):
            parts.append(p.mT @ y)
        else:
            slopes = factor * p * _centred(y @ v.mT, p)
            parts.append(slopes @ k if path == (0,) else slopes.mT @ q)
    out = torch.stack(parts, 1)
    if path != (0,) and shared > 1:
        out = out.unflatten(1, (-1, shared)).sum(2)
    return out.reshape(done.args[int(path[0])].shape)


def _centred(delta: Tensor, p: Tensor) -> Tensor:
    """Less its mean under the weights p: times p, it is the derivative at s of p = softmax(s)."""
    return delta - (delta * p).sum(-1, keepdim=True)


def _of_head(mask: Tensor, head: int) -> Tensor:
    """Of a mask (..., H, L, S), where H may be 1."""
    return mask.select(-3, head if mask.shape[-3] > 1 else 0)


# a query is read for its own token; keys and values for all
enter(Adjoint(_pull_attention, live=rows(0), paths=((0,), (1,), (2,)), opaque=drops), *KERNELS)
