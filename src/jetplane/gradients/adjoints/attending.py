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
_SMALL = 1 << 24  # bytes


def _pull_attention(delta: Tensor, done: Done, path: Path) -> Tensor:
    """With p = softmax(scale q k^T + bias) and y = p v; some heads at a time, for p is as large as the square of L."""
    options = options_of(done.func, done.args, done.kwargs)
    query, key, value = done.args[:3]
    shared = query.shape[-3] // key.shape[-3]  # heads that read the same keys
    factor = options.get("scale")
    factor = query.shape[-1] ** -0.5 if factor is None else factor
    bias = bias_of(options)
    parts = []
    for some in _some_heads(query, key, shared):
        q, y = query[:, some], delta[:, some]
        k, v = (_read_by(some, one, shared) for one in (key, value))
        scores = factor * q @ k.mT
        mask = added(bias, scores, options.get("is_causal", False))
        p = aten._safe_softmax(scores + _of_heads(mask, some), -1)
        if path == (2,):
            parts.append(p.mT @ y)
        else:
            slopes = factor * p * _centred(y @ v.mT, p)
            parts.append(slopes @ k if path == (0,) else slopes.mT @ q)
    out = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    if path != (0,) and shared > 1:
        out = out.unflatten(1, (-1, shared)).sum(2)
    return out.reshape(done.args[int(path[0])].shape)


def _some_heads(query: Tensor, key: Tensor, shared: int) -> list[slice]:
    """Heads that are taken at once: few operations, and weights p that are no larger than the query, or small."""
    heads = query.shape[-3]
    one = query[:, :1, :, :1].numel() * key.shape[-2] * query.element_size()  # bytes of a head's weights
    count = min(heads, max(1, max(_SMALL, query.nbytes) // max(one, 1)))
    if shared > 1:  # those that read the same keys, or one alone
        count = count // shared * shared or 1
    return [slice(first, min(first + count, heads)) for first in range(0, heads, count)]


def _read_by(some: slice, one: Tensor, shared: int) -> Tensor:
    """What these heads read of keys or values."""
    read = one[:, some.start // shared : (some.stop - 1) // shared + 1]
    return read if shared == 1 or some.stop - some.start == 1 else read.repeat_interleave(shared, 1)


def _centred(delta: Tensor, p: Tensor) -> Tensor:
    """Less its mean under the weights p: times p, it is the derivative at s of p = softmax(s)."""
    return delta - (delta * p).sum(-1, keepdim=True)


def _of_heads(mask: Tensor, some: slice) -> Tensor:
    """Of a mask (..., H, L, S), where H may be 1 or left out."""
    return mask if mask.ndim < 3 or mask.shape[-3] == 1 else mask[..., some, :, :]


# a query is read for its own token; keys and values for all
enter(Adjoint(_pull_attention, live=rows(0), paths=((0,), (1,), (2,)), opaque=drops), *KERNELS)
