"""Small networks of convolution, ReLU and max-pooling, and what their kernels need."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

F64 = torch.float64

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Layers(nn.Module):
    """Convolutions with what is put behind them."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds = kinds
        self.convolutions = nn.ModuleList(nn.Conv2d(1 if n == 0 else 3, 3, 3, padding=1) for n in range(len(kinds)))

    def forward(self, x: Tensor) -> Tensor:
        """One number for each image."""
        for kind, convolution in zip(self.kinds, self.convolutions, strict=True):
            x = LAYERS[kind](convolution(x))
        return x.flatten(1).sum(1)


LAYERS: dict[str, Any] = {
    "relu, pool": lambda y: F.max_pool2d(F.relu(y), 2),
    "pool, relu": lambda y: F.max_pool2d(y, (2, 2), 2).relu(),
    "in place": lambda y: torch.max_pool2d(y.relu_(), 2, [2, 2]),
    "pool, in place": lambda y: F.relu(F.max_pool2d(y, 2), inplace=True),
    "one more": lambda y: F.max_pool2d(F.relu(y), 2) + 1,  # the same tangents as before, and another value
    "one more in place": lambda y: F.max_pool2d(F.relu(y), 2).add_(1),
    # and what must not be taken for it
    "kept": lambda y: F.max_pool2d(F.relu(y), 2) + y.mean(),
    "used twice": lambda y: (lambda r: F.max_pool2d(r, 2) * r.mean())(F.relu(y)),
    "three": lambda y: F.max_pool2d(F.relu(y), 3),
    "overlapping": lambda y: F.max_pool2d(F.relu(y), 2, 1),
    "padded": lambda y: F.max_pool2d(F.relu(y), 2, 2, 1),
    "upwards": lambda y: F.max_pool2d(F.relu(y), 2, ceil_mode=True),
    "indices": lambda y: F.max_pool2d(F.relu(y), 2, return_indices=True)[0],
    "other": lambda y: F.max_pool2d(F.leaky_relu(y), 2),
    "no pool": lambda y: F.relu(y),
}


def program(*kinds: str) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Layers(*kinds).double()
    x = torch.randn(3, 1, 9, 10, dtype=F64)
    params = {name: value.detach() for name, value in model.named_parameters()}
    directions = {name: torch.randn(3, *value.shape, dtype=F64) for name, value in params.items()}
    return lambda params: torch.func.functional_call(model, params, (x,)).square().mean(), params, directions
