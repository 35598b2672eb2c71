"""Determinants, also of singular matrices, and the matrix exponential."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import jetplane as jp
from cases import F64, assert_close, check_against_oracle, randn, vec


def by_permutations(x: Tensor) -> Tensor:
    """The determinant of a 3 x 3 matrix as the polynomial that it is."""
    return (x[0] * torch.linalg.cross(x[1], x[2])).sum()


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_determinant_is_a_polynomial_whatever_the_rank(rank: int) -> None:
    x = randn(3, rank) @ randn(rank, 3)
    check_against_oracle(torch.linalg.det, x, twin=by_permutations)


def test_the_logarithm_of_a_determinant() -> None:
    x, v = randn(4, 4) + 4 * torch.eye(4, dtype=F64), randn(2, 4, 4)
    found = jp.quadratic(lambda x: torch.linalg.slogdet(x)[1], x, v)
    turned = torch.linalg.solve(x, v)  # d log det = tr(x^-1 v), and once more -tr(x^-1 v x^-1 w)
    assert_close(found.slope, turned.diagonal(dim1=-2, dim2=-1).sum(-1))
    assert_close(found.curvature, -torch.einsum("aij,bji->ab", turned, turned))


def test_the_exponential_of_a_turn() -> None:
    """exp of t times a quarter turn is a rotation by t, whose second derivative is its opposite."""
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=F64)
    t = vec(0.7).reshape(())
    jet = jp.jet(lambda t: torch.linalg.matrix_exp(t * turn), t, torch.ones(1, dtype=F64))
    rotation = torch.stack([torch.stack([t.cos(), -t.sin()]), torch.stack([t.sin(), t.cos()])])
    assert_close(jet.primal, rotation)
    assert_close(jet.tangent[0], turn @ rotation)
    assert_close(jet.second[0], -rotation)
