"""The secular equation of the trust region and of cubic regularisation."""

from __future__ import annotations

import pytest
import torch

from cases import F64
from jetplane.solvers import (
    Cubic,
    TrustRegion,
)
from test_base import quadratic


@pytest.mark.parametrize("k", [1, 3, 8])
def test_trust_region_and_cubic_meet_their_conditions(k: int) -> None:
    for _ in range(20):
        curvature = torch.randn(k, k, dtype=F64)
        model = quadratic(torch.randn(k, dtype=F64), curvature + curvature.T)
        lowest = float(torch.linalg.eigvalsh(model.curvature)[0])
        for solver in (TrustRegion(0.3), Cubic(0.7)):
            c = solver(model).coefficients
            residual = model.curvature @ c + model.slope  # = -mu c
            shift = -float(residual @ c / (c @ c))
            torch.testing.assert_close(residual, -shift * c, rtol=1e-9, atol=1e-9)
            assert shift >= max(0.0, -lowest) - 1e-9
            size = float(c.norm())
            expected = 0.7 * size if isinstance(solver, Cubic) else shift * size / 0.3
            assert abs(shift - expected) < 1e-9
