"""Norms without an oracle against their formulas."""

from __future__ import annotations

from torch import nn

import jetplane as jp
from cases import (
    along,
    assert_quadratic,
    randn,
)
from jetplane.testing.oracle import double_backward


def test_weight_norm_against_its_formula() -> None:
    # double backward of torch._weight_norm is wrong in torch 2.13 (its curvature is not symmetric): no oracle
    x = randn(3, 5)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4, bias=False)).double()
    leaves = list(layer.parameters())
    directions = along(leaves, 3)
    with jp.perturb(leaves, directions) as jets:
        actual = jets.quadratic(layer(x).sin().sum())
    length, weight = leaves
    formula = double_backward(
        lambda: (x @ (length * weight / weight.norm(dim=1, keepdim=True)).T).sin().sum(), leaves, directions
    )
    assert_quadratic(actual, formula)
