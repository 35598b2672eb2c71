"""Fused attention."""

from __future__ import annotations

import torch
from torch import Tensor

import jetplane as jp
from cases import (
    assert_close,
    randn,
)


def test_dropout_of_fused_attention_is_drawn_once() -> None:
    q, k, v = randn(3, 1, 2, 4, 8)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def program(q: Tensor) -> Tensor:
        return fused(q, k, v, 0.5, True)[0].square().sum()

    assert jp.verify(program, q).ok
    torch.manual_seed(0)
    whole = jp.hessian(program, q)
    torch.manual_seed(0)
    assert_close(jp.hessian(program, q, chunk_size=7), whole)
    assert float(whole.abs().max()) > 0.1
