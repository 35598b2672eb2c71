"""Losses against double backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

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
