"""Losses against double backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import jetplane as jp
from cases import (
    LOSSES,
    check,
    check_against_oracle,
    randn,
    vec,
)


@pytest.mark.parametrize(("loss", "twin"), [row[1:] for row in LOSSES], ids=[row[0] for row in LOSSES])
def test_losses(loss, twin) -> None:
    check_against_oracle(loss, randn(4, 3), twin=twin, tolerance=1e-10)


@pytest.mark.parametrize("loss", [F.huber_loss, F.smooth_l1_loss])
def test_a_residual_of_zero_lies_in_the_quadratic_zone(loss) -> None:
    x = vec(1.0, 2.5, -3.0)
    check(
        lambda x: loss(x, vec(1.0, 2.0, 0.0), reduction="sum"), x, vec(0.0, 0.5, -1.0), torch.diag(vec(1.0, 1.0, 0.0))
    )


def test_smooth_l1_without_a_quadratic_zone_is_l1() -> None:
    check(lambda x: F.smooth_l1_loss(x, vec(1, 2), beta=0.0), vec(1, 4), vec(0, 0.5), torch.zeros(2, 2).double())


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weight", [None, vec(1.0, 2.0, 3.0, 4.0, 5.0)], ids=["plain", "weighted"])
def test_a_sigmoid_of_0_or_1_has_a_finite_cross_entropy(reduction: str, weight: torch.Tensor | None) -> None:
    # torch bounds the derivatives there, and the sigmoid's are zero
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy(x.sigmoid(), target, weight, reduction=reduction).sum()

    x, target = vec(-800.0, 40.0, 0.3, -2.0, 1.5), vec(0.0, 1.0, 1.0, 0.3, 0.0)
    check_against_oracle(lambda x: loss(x, target), x, tolerance=1e-10)
    check_against_oracle(lambda y: loss(y.sin(), y.sigmoid()), vec(0.1, 0.5, -1.0, 2.0, 0.7), tolerance=1e-10)


def test_the_weight_of_a_binary_cross_entropy_is_a_constant() -> None:
    with pytest.raises(jp.MissingRule, match="does not differentiate its argument 'weight', which is perturbed"):
        jp.gradient(lambda w: F.binary_cross_entropy(vec(0.5), vec(1.0), w), vec(2.0))
