"""Activations against their formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import Tensor

from cases import check_against_oracle, vec


def test_hardsigmoid_against_its_formula() -> None:
    # hardsigmoid has no double backward
    twin = lambda x: (F.relu6(x + 3) / 6).square().sum()  # noqa: E731
    check_against_oracle(lambda x: F.hardsigmoid(x).square().sum(), vec(-4, -2.5, 0.3, 2.9, 3.5), twin=twin)


@pytest.mark.parametrize(
    ("function", "kink"),
    [
        (F.elu, 0.0),
        (F.selu, 0.0),
        (F.celu, 0.0),
        (lambda x: F.elu(x, alpha=0.7), 0.0),
        (lambda x: F.softplus(x, beta=2.0, threshold=1.0), 0.5),
        (F.leaky_relu, 0.0),
        (F.hardshrink, 0.5),
        (F.softshrink, 0.5),
        (F.hardtanh, 1.0),
        (F.relu6, 6.0),
    ],
)
def test_at_a_kink_it_is_torchs_side(function: Callable[[Tensor], Tensor], kink: float) -> None:
    check_against_oracle(lambda x: function(x).square().sum() + function(x).sum(), vec(kink, -kink, -0.0))
