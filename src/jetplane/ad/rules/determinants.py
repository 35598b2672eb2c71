"""Rules of determinants and the matrix exponential. The technique is explained in nilpotent.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..algebra.families import jet_rule
from ..algebra.jet import Operand, PairSet
from .nilpotent import (
    Nil,
    joined,
    mm,
    nil,
)

aten = torch.ops.aten
linalg = torch.linalg

# -- determinants --------------------------------------------------------------------------------------------------


@jet_rule(aten._linalg_slogdet.default, "linalg")
def _slogdet(pairs: PairSet, op: Any, A: Operand) -> Any:
    """log det (A0 (I + e)) = log det A0 + tr e - tr(e e) / 2; its imaginary part s turns the sign of a complex one."""
    sign, logabsdet, LU, pivots = op(A.primal)
    e = _left_divided(A.primal, nil(pairs, A))
    logarithm = e.trace - _trace_of_square(e) * 0.5
    if not sign.is_complex():
        return sign, joined(logabsdet, logarithm), LU, pivots
    s = logarithm.map(torch.imag)
    return joined(sign, (s * 1j - s * s * 0.5) * sign), joined(logabsdet, logarithm.real), LU, pivots


def _left_divided(A: Tensor, a: Nil) -> Nil:
    """A^-1 a, infinite and not an error where A is singular."""
    LU, pivots, _ = linalg.lu_factor_ex(A)
    return a.map(lambda rows: linalg.lu_solve(LU, pivots, rows))


def _trace_of_square(e: Nil) -> Nil:
    return (e * e.mT).map(lambda rows: rows.sum((-2, -1)))


@jet_rule(aten._linalg_det.default, "linalg")
def _det(pairs: PairSet, op: Any, A: Operand) -> Any:
    """A polynomial, so it has derivatives at singular matrices too: around those by the SVD, elsewhere by a solve.

    The SVD would serve for both, but an outer pass differentiates these formulas, and it has no derivative where
    singular values repeat. Each formula sees a harmless matrix where the other one is used.
    """
    det, LU, pivots = op(A.primal)
    a, n = nil(pairs, A), A.primal.shape[-1]
    if n == 0:
        return det, LU, pivots
    regular = _is_regular(A.primal.detach())
    chosen = regular[..., None, None]
    identity = torch.eye(n, dtype=det.dtype, device=det.device)
    spaced = torch.diag(torch.arange(1, n + 1, device=det.device).to(det.dtype))
    by_solve = _det_by_solve(torch.where(chosen, A.primal, identity), det, a)
    by_svd = _det_by_svd(torch.where(chosen, spaced, A.primal), a)
    return joined(det, _choose(regular, by_solve, by_svd)), LU, pivots


def _is_regular(A: Tensor) -> Tensor:
    """Whether a solve with A is accurate. Matrices with nan or inf count as regular: the SVD would raise on them."""
    broken = ~A.isfinite().all(-1).all(-1)
    S = linalg.svdvals(torch.where(broken[..., None, None], 0.0, A))
    return broken | (torch.finfo(S.dtype).eps ** 0.25 * S[..., 0] < S[..., -1])


def _choose(condition: Tensor, a: Nil, b: Nil) -> Nil:
    def where(x: Tensor | None, y: Tensor | None) -> Tensor | None:
        return None if x is None or y is None else torch.where(condition, x, y)

    return Nil(a.pairs, where(a.tangent, b.tangent), where(a.second, b.second))


def _det_by_solve(A: Tensor, det: Tensor, a: Nil) -> Nil:
    """det (A0 (I + e)) = det A0 (1 + tr e + ((tr e)^2 - tr(e e)) / 2)."""
    e = _left_divided(A, a)
    return (e.trace + (e.trace * e.trace - _trace_of_square(e)) * 0.5) * det


def _det_by_svd(A: Tensor, a: Nil) -> Nil:
    """det (S + e) = prod S + sum_i e_ii P_i + sum_{i<j} (e_ii e_jj - e_ij e_ji) P_ij, for e = U^H a V.

    P_i and P_ij are the products of S without the i-th, and the i-th and j-th, value: no division.
    """
    U, S, Vh = linalg.svd(A)
    sign = linalg.det((U @ Vh).detach()).sgn()
    e = mm(U.mH, a, Vh.mH)
    without_one, without_two = _products_without(S)
    d = e.diagonal
    minors = d.map(lambda rows: rows.unsqueeze(-1)) * d.map(lambda rows: rows.unsqueeze(-2)) - e * e.mT
    first = (d * without_one).map(lambda rows: rows.sum(-1))
    return (first + (minors * without_two).map(lambda rows: rows.sum((-2, -1)))) * sign


def _products_without(S: Tensor) -> tuple[Tensor, Tensor]:
    """P_i (*, n) and P_ij (*, n, n), the latter on the strict upper triangle."""
    ones = torch.ones_like(S[..., :1])
    before = torch.cat([ones, S[..., :-1].cumprod(-1)], -1)
    after = torch.cat([S[..., 1:].flip(-1).cumprod(-1).flip(-1), ones], -1)
    # between[i, j] = product of S_k over i < k < j
    n = S.shape[-1]
    upper = torch.ones(n, n, dtype=torch.bool, device=S.device).triu(1)
    between = torch.where(upper, S.unsqueeze(-2), 1.0)
    between = torch.cat([torch.ones_like(between[..., :1]), between[..., :-1].cumprod(-1)], -1)
    return before * after, torch.where(upper, before.unsqueeze(-1) * between * after.unsqueeze(-2), 0.0)


# -- exponential ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpProduct:
    """Q(e, f), the part of exp(A + e + f) that has e once before f once, over leading row axes."""

    A: Tensor

    def __call__(self, *blocks: Tensor) -> Tensor:
        """The corner of exp of the block matrix with A on the diagonal and ``blocks`` beside it (Van Loan)."""
        n, count = self.A.shape[-1], len(blocks) + 1
        shape = torch.broadcast_shapes(*(block.shape for block in blocks))
        zero = torch.zeros((), dtype=self.A.dtype, device=self.A.device).expand(shape)
        rows = []
        for i in range(count):
            row = [zero] * count
            row[i] = self.A.expand(shape)
            if i + 1 < count:
                row[i + 1] = blocks[i].expand(shape)
            rows.append(torch.cat(row, -1))
        return torch.matrix_exp(torch.cat(rows, -2))[..., :n, -n:]

    left = right = paired = __call__

    def grid(self, a: Tensor, b: Tensor) -> Tensor:
        return self(a[:, None], b[None])


@jet_rule(aten.linalg_matrix_exp.default, "linalg")
def _matrix_exp(pairs: PairSet, op: Any, A: Operand) -> Any:
    """exp' [e] = corner of exp [[A, e], [0, A]], and exp'' [e, f] = Q(e, f) + Q(f, e)."""
    lifted, a = ExpProduct(A.primal), nil(pairs, A)
    part = a.map(lifted)
    if pairs.rows and a.tangent is not None:
        part = part + Nil(pairs, None, pairs.bilinear(lifted, a.tangent, a.tangent))
    return joined(op(A.primal), part)
