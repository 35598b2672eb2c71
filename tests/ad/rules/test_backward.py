"""Backward passes inside the program."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import jetplane as jp
from cases import F64, assert_close


@pytest.mark.parametrize("causal", [False, True])
def test_backward_of_a_fused_kernel_inside_the_program(causal: bool) -> None:
    q, k, v = (torch.randn(1, 2, 4, 8, dtype=F64) for _ in range(3))

    def program(x: Tensor, backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend), torch.enable_grad():
            a = x.clone().requires_grad_()
            out = torch.nn.functional.scaled_dot_product_attention(a, k * x, v * x, is_causal=causal)
            (slope,) = torch.autograd.grad(out.sin().sum(), a, create_graph=True)
        return slope.square().sum()

    directions = torch.randn(2, *q.shape, dtype=F64)
    fused, unfused = (
        jp.quadratic(lambda x, backend=backend: program(x, backend), q, directions)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    )
    assert_close(fused.slope, unfused.slope)
    assert_close(fused.curvature, unfused.curvature)
