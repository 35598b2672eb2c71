"""Eigenvalues, singular values and pseudo-inverses."""

from __future__ import annotations

import torch

import jetplane as jp
from cases import F64, assert_close, check_against_oracle, randn


def test_eigenvalues_of_a_diagonal_follow_perturbation_theory() -> None:
    """l_i + v_ii + sum_j v_ij^2 / (l_i - l_j), for a symmetric perturbation v of a diagonal."""
    values = torch.tensor([1.0, 2.5, 4.0, 7.0], dtype=F64)
    v = randn(1, 4, 4)
    v = v + v.mT
    jet = jp.jet(torch.linalg.eigvalsh, torch.diag(values), v)
    gaps = values[:, None] - values + torch.eye(4, dtype=F64)
    shares = (v[0].square() / gaps).masked_fill(torch.eye(4, dtype=torch.bool), 0.0)
    assert_close(jet.tangent[0], v[0].diagonal())
    assert_close(jet.second[0], 2 * shares.sum(1))


def test_singular_values_against_double_backward() -> None:
    check_against_oracle(lambda x: torch.linalg.svdvals(x).pow(3).sum(), randn(4, 3))
    check_against_oracle(lambda x: torch.linalg.svdvals(x).square().sum(), randn(3, 5), twin=lambda x: x.square().sum())


def test_the_pseudo_inverse_of_a_tall_matrix() -> None:
    y = randn(3, 5)
    check_against_oracle(
        lambda x: (torch.linalg.pinv(x) * y).sum(),
        randn(5, 3),
        twin=lambda x: (torch.linalg.solve(x.mT @ x, x.mT) * y).sum(),
    )
