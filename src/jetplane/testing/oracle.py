"""Slopes and curvatures by double backward: the reference that every test compares with.

Nested torch.func.jvp is not used, for it is wrong at second order for several operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..ad.algebra.jet import Quadratic


def double_backward(
    function: Callable[[], Tensor], leaves: Sequence[Tensor], directions: Sequence[Tensor]
) -> Quadratic:
    """The quadratic model of a real scalar program in the plane of ``directions``, by reverse over reverse mode.

    Of a complex leaf torch's gradient g has the slope Re(conj(g) d): its parts are those by the leaf's two parts.
    ``leaves`` must require grad; ``directions`` are one tensor (K, *S) for each of them. Attention runs unfused, for
    the fused kernels have no double backward.
    """
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        loss = function()
        count = directions[0].shape[0]
        curvature = loss.new_zeros((count, count))
        slope = loss.new_zeros(count)
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
            for i in range(count):
                along = _inner(gradients, [d[i] for d in directions])
                if along is None:
                    continue
                slope[i] = along.detach()
                if not along.requires_grad:
                    continue
                second = torch.autograd.grad(along, leaves, retain_graph=True, allow_unused=True)
                for j in range(count):
                    term = _inner(second, [d[j] for d in directions])
                    curvature[i, j] = 0.0 if term is None else term.detach()
    return Quadratic(loss.detach(), slope, curvature)


def _inner(gradients: Sequence[Tensor | None], directions: Sequence[Tensor]) -> Tensor | None:
    terms = [
        (g.conj() * d).sum().real if g.is_complex() else (g * d).sum()
        for g, d in zip(gradients, directions, strict=True)
        if g is not None
    ]
    return sum(terms[1:], terms[0]) if terms else None
