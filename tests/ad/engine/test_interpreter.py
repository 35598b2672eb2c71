"""What the engine carries, and what it does not."""

from __future__ import annotations

import pytest
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import jetplane as jp
from cases import (
    along,
    randn,
)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_first_order_does_no_second_order_work(k: int) -> None:
    net = nn.Sequential(
        nn.Linear(4, 8, bias=False), nn.Linear(8, 16, bias=False), nn.Linear(16, 2, bias=False)
    ).double()
    x, leaves = randn(3, 4), list(net.parameters())
    products = [2 * 3 * p.numel() for p in leaves]
    with FlopCounterMode(display=False) as counter, jp.perturb(leaves, along(leaves, k), pairs="none"):
        net(x).sum()
    # the first layer's input has no tangent: one product for the value, K for the weight's directions
    assert counter.get_total_flops() == products[0] * (1 + k) + (products[1] + products[2]) * (1 + 2 * k)


def test_data_without_tangents_gives_no_second_rows() -> None:
    w, x = randn(4, 3), randn(5, 3)
    with jp.perturb([w], [randn(2, 4, 3)]) as jets:
        assert jets._pass.mode.jet(x @ w.T).second is None
