"""Planes of a few directions are solved in Python's own arithmetic: the same steps as by tensors."""

from __future__ import annotations

import pytest
import torch

from cases import F64
from jetplane.ad.algebra.jet import Quadratic
from jetplane.solvers import AbsoluteCurvature, JitteredInverse, NegativeSlope, Solver, base

SOLVERS = [
    NegativeSlope(0.5),
    AbsoluteCurvature(),
    AbsoluteCurvature(eps=0.0),
    JitteredInverse(),
    JitteredInverse(tries=1),
]


def models(k: int, dtype: torch.dtype) -> list[Quadratic]:
    generator = torch.Generator().manual_seed(k)
    found = []
    for scale in (1.0, 1e-8, 1e8, 0.0):
        matrix = torch.randn(k, k, generator=generator, dtype=F64)
        slope = torch.randn(k, generator=generator, dtype=F64)
        found.append(Quadratic(torch.ones((), dtype=dtype), slope.to(dtype), (scale * (matrix + matrix.T)).to(dtype)))
    singular = torch.ones(k, k, dtype=dtype)
    found.append(Quadratic(torch.ones((), dtype=dtype), found[0].slope, singular))
    found.append(Quadratic(torch.ones((), dtype=dtype), found[0].slope, singular * float("nan")))
    found.append(Quadratic(torch.ones((), dtype=dtype), torch.zeros(k, dtype=dtype), singular))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_a_few_numbers_are_solved_as_tensors_are(
    solver: Solver, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [solver(model) for model in models(k, dtype)]
    monkeypatch.setattr(base, "_FEW", 0)
    for step, model in zip(steps, models(k, dtype), strict=True):
        expected = solver(model)
        assert step.status is expected.status
        torch.testing.assert_close(
            step.coefficients, expected.coefficients, rtol=1e-5 if dtype != F64 else 1e-9, atol=0
        )
        torch.testing.assert_close(step.predicted, expected.predicted, rtol=1e-4 if dtype != F64 else 1e-7, atol=1e-12)
