"""Detached memory that a parameter or a buffer shares: no noise goes there in silence."""

from __future__ import annotations

import pytest
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


def test_a_write_of_what_varies_through_data_is_refused() -> None:
    layer, kept = nn.Linear(3, 3, dtype=F64), torch.zeros(3, dtype=F64)

    def losses(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        kept.data.lerp_(y.mean(0), 0.1)
        return (y - kept).square().sum(1)

    with pytest.raises(
        jp.UnsupportedProgram, match=r"writes what depends on parameters into a detached tensor.*under torch\.no_grad"
    ):
        jp.forward_gradient(losses, list(layer.parameters()), torch.randn(4, 3, dtype=F64))
