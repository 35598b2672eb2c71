"""Constants in a parameter's memory, made before the call: no noise and no gradient goes to them."""

from __future__ import annotations

import torch
from torch import nn

import jetplane as jp

F64 = torch.float64


def test_a_target_detached_before_the_call_is_a_constant() -> None:
    layer = nn.Linear(3, 3, bias=False, dtype=F64)
    held = layer.weight.detach().t()
    x = torch.randn(4, 3, dtype=F64)

    def losses(x: torch.Tensor) -> torch.Tensor:
        return (layer(x) * (x @ held).sin()).sum(1)  # linear in the layer: one draw has the exact gradient

    (right,) = torch.autograd.grad(losses(x).mean(), layer.weight)
    jp.forward_gradient(losses, [layer.weight], x)
    torch.testing.assert_close(layer.weight.grad, right)
