"""Cubic regularisation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetplane.solvers import (
    Cubic,
    Status,
)
from test_base import quadratic, value
from test_trust import PLANES, search


@pytest.mark.parametrize("sigma", [0.3, 1.0, 20.0])
@pytest.mark.parametrize("name", PLANES)
def test_cubic_finds_the_least_value(name: str, sigma: float) -> None:
    model = quadratic(*PLANES[name])

    def objective(c: Tensor) -> Tensor:
        return value(model, c) + sigma * c.norm(dim=-1) ** 3 / 3

    step = Cubic(sigma)(model)
    assert step.status is Status.OK
    expected = search(objective, radius=25.0)
    torch.testing.assert_close(float(objective(step.coefficients)), expected, rtol=1e-8, atol=1e-8)
