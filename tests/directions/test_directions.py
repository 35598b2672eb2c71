"""Families of directions: the numbers, their laws, and that they are the same however they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import Tensor

import jetplane as jp
from jetplane.curvature import Curvature, ExactHessian, NoCurvature
from jetplane.directions import (
    Coordinate,
    Family,
    Fixed,
    Gaussian,
    Gradient,
    Orthonormal,
    Plane,
    Rademacher,
    Sphere,
)

F32, F64 = torch.float32, torch.float64
CPU = torch.device("cpu")
RANDOM = [Gaussian, Rademacher, Sphere, Orthonormal]


def plane(leaves: Sequence[Tensor], seed: int = 0, step: int = 0, sample: int = 0) -> Plane:
    return Plane(seed, step, sample, leaves, lambda: [2 * leaf for leaf in leaves])


def leaves(dtype: torch.dtype = F64) -> list[Tensor]:
    return [torch.randn(3, 5, dtype=dtype), torch.randn((), dtype=dtype), torch.randn(7, dtype=dtype)]


def all_rows(family: Family, made: Plane) -> Tensor:
    """(K, D)"""
    drawn = family.draw(made)
    return torch.cat([drawn.rows(i, x, 0, drawn.k).reshape(drawn.k, -1) for i, x in enumerate(made.leaves)], dim=1)


# -- the others -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", [*(make(2) for make in RANDOM), Coordinate(), Gradient(), Fixed([torch.ones(2, 3)])], ids=repr
)
def test_families_are_frozen_and_follow_the_protocol(family: Family) -> None:
    assert isinstance(family, Family)
    with pytest.raises(FrozenInstanceError):
        family.k = 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", [*(make(3) for make in RANDOM), Coordinate(), Gradient()], ids=repr)
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_the_engine_takes_them(family: Family, chunk_size: int | None) -> None:
    x = torch.randn(6, dtype=torch.float64)
    made = plane([x])
    model = jp.quadratic(lambda x: (x**3).sum(), x, family.draw(made), chunk_size=chunk_size)
    rows = all_rows(family, made)
    torch.testing.assert_close(model.slope, rows @ (3 * x**2))
    torch.testing.assert_close(model.curvature, rows @ torch.diag(6 * x) @ rows.T)


# -- curvature ------------------------------------------------------------------------------------------------------


def test_curvatures_read_the_jet() -> None:
    x, v = torch.randn(4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    expected = jp.quadratic(lambda x: x.cos().prod(), x, v)
    for curvature, second in [
        (ExactHessian(), expected.curvature),
        (NoCurvature(), torch.zeros(3, 3, dtype=torch.float64)),
    ]:
        assert isinstance(curvature, Curvature)
        pairs = curvature.pairs(3)
        model = curvature.model(jp.jet(lambda x: x.cos().prod(), x, v, pairs=pairs), pairs)
        torch.testing.assert_close(model.slope, expected.slope)
        torch.testing.assert_close(model.curvature, second)
        assert float(model.loss) == float(expected.loss)


def test_a_loss_that_does_not_depend_on_the_parameters_has_a_flat_model() -> None:
    model = ExactHessian().model(jp.Jet(torch.tensor([1.0]), None, None), ExactHessian().pairs(2))
    assert model.loss.shape == () and not model.slope.any() and model.curvature.shape == (2, 2)


# -- bad input ------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_a_number() -> None:
    pairs = ExactHessian().pairs(1)
    with pytest.raises(ValueError, match=r"^the loss has shape \(1, 2\); expected a single number, or one for each"):
        ExactHessian().model(jp.Jet(torch.ones(1, 2), torch.ones(1, 1, 2), torch.ones(1, 1, 2)), pairs)
