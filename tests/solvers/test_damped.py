"""Damping."""

from __future__ import annotations

import torch

from cases import F64
from jetplane.solvers import (
    Damped,
)
from test_base import quadratic


def test_damping_is_raised_until_positive_definite() -> None:
    model = quadratic([1.0, 1.0], [[-5.0, 0.0], [0.0, 1.0]])
    torch.testing.assert_close(Damped(0.1)(model).coefficients, -1 / torch.tensor([5.0, 11.0], dtype=F64))
    torch.testing.assert_close(Damped(8.0)(model).coefficients, -1 / torch.tensor([3.0, 9.0], dtype=F64))
