"""Inverses, solutions, and the Cholesky, LU and QR factors."""

from __future__ import annotations

import torch
from torch import Tensor

import jetplane as jp
from cases import F64, assert_close, check_against_oracle, randn


def regular(n: int) -> Tensor:
    return randn(n, n) + n * torch.eye(n, dtype=F64)


def test_an_inverse_is_its_series() -> None:
    """(x + v)^-1 = x^-1 - x^-1 v x^-1 + x^-1 v x^-1 v x^-1 - ..."""
    x, v = regular(4), randn(1, 4, 4)
    jet, y = jp.jet(torch.linalg.inv, x, v), torch.linalg.inv(x)
    assert_close(jet.tangent[0], -y @ v[0] @ y)
    assert_close(jet.second[0], 2 * y @ v[0] @ y @ v[0] @ y)


def test_factors_multiply_to_the_matrix() -> None:
    """The jet of L U, Q R and L L^T is that of the matrix: linear, and without curvature."""
    x, v = regular(4), randn(2, 4, 4)
    for program in (
        lambda x: torch.linalg.multi_dot(list(torch.linalg.lu(x))),
        lambda x: torch.matmul(*torch.linalg.qr(x)),
    ):
        jet = jp.jet(program, x, v)
        assert_close(jet.primal, x)
        assert_close(jet.tangent, v)
        assert jet.second.abs().max() < 1e-11
    spd = x @ x.mT
    both = jp.jet(lambda x: (lambda c: c @ c.mT)(torch.linalg.cholesky(x)), spd, v + v.mT)
    assert_close(both.tangent, v + v.mT)
    assert both.second.abs().max() < 1e-10


def test_solutions_against_double_backward() -> None:
    b = randn(4, 2)
    check_against_oracle(lambda a, b: torch.linalg.solve(a, b).sin().sum(), regular(4), b)
    check_against_oracle(lambda a: torch.cholesky_solve(b, torch.linalg.cholesky(a @ a.mT)).sin().sum(), regular(4))
    check_against_oracle(lambda a: torch.linalg.solve_triangular(a, b, upper=True).sin().sum(), regular(4))
