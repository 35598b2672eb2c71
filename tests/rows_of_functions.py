"""Functions of tensors with rows from closed forms."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.functional import hessian as reverse_hessian
from torch.autograd.functional import jacobian as reverse_jacobian

from cases import F64

A = torch.linspace(-1, 1, 9, dtype=F64).view(3, 3)


def scalar(x: Tensor) -> Tensor:
    return ((A @ x).tanh() * x.exp()).sum() ** 2


def vector(x: Tensor) -> Tensor:
    return (A @ x).sin() * x.prod()


def exact_rows(function, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value, (K, *out) and (K, K, *out) of a function of one vector, by reverse mode."""
    y = function(x)
    parts = [y[i] for i in range(y.numel())] if y.ndim else [y]
    slopes, curvatures = [], []
    for i in range(len(parts)):
        entry = (lambda z, i=i: function(z)[i]) if y.ndim else function
        slopes.append(v @ reverse_jacobian(entry, x))
        curvatures.append(v @ reverse_hessian(entry, x) @ v.T)
    slope, curvature = torch.stack(slopes, -1), torch.stack(curvatures, -1)
    return (y, slope, curvature) if y.ndim else (y, slope[..., 0], curvature[..., 0])
