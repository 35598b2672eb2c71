"""Solvers by the spectrum of the curvature."""

from __future__ import annotations

import torch

from cases import F64
from jetplane.solvers import (
    SaddleFree,
    SoftAbs,
)
from test_base import quadratic


def test_spectral_solvers_take_absolute_values() -> None:
    axes = torch.linalg.qr(torch.randn(3, 3, dtype=F64)).Q
    values, slope = torch.tensor([-2.0, 0.5, 4.0], dtype=F64), torch.randn(3, dtype=F64)
    model = quadratic(slope, axes @ torch.diag(values) @ axes.T)
    torch.testing.assert_close(SaddleFree()(model).coefficients, -axes @ (axes.T @ slope / values.abs()))
    smooth = values / torch.tanh(3 * values)
    torch.testing.assert_close(SoftAbs(3.0)(model).coefficients, -axes @ (axes.T @ slope / smooth))


def test_saddle_free_floor_and_zero_plane() -> None:
    model = quadratic([1.0, 1.0], [[1.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(SaddleFree(0.01)(model).coefficients, torch.tensor([-1.0, -100.0], dtype=F64))
    model = quadratic([1.0, -2.0], torch.zeros(2, 2))
    torch.testing.assert_close(SaddleFree()(model).coefficients, -model.slope)
