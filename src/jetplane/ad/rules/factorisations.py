"""Rules of solves and triangular factorisations. The technique is explained in nilpotent.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...errors import UnsupportedProgram
from ..algebra.families import composite, jet_rule, primal_of
from ..algebra.jet import Operand, PairSet
from .nilpotent import (
    Nil,
    half_lower,
    hermitian,
    inverse_less_one,
    is_vector,
    joined,
    joined_along,
    mm,
    nil,
    strictly_lower,
    upper,
)

aten = torch.ops.aten
linalg = torch.linalg

# -- inverse and solve ---------------------------------------------------------------------------------------------


@jet_rule(aten.linalg_inv_ex.default, "linalg")
def _inv(pairs: PairSet, op: Any, A: Operand, *, check_errors: bool = False) -> Any:
    """(A0 + a)^-1 = X - X a X + X a X a X."""
    X, info = op(A.primal, check_errors=check_errors)
    f = mm(X, nil(pairs, A))
    return joined(X, mm(inverse_less_one(f), X)), info


def _refined(solve: Callable[[Tensor], Tensor], a: Nil, x: Tensor, b: Nil) -> Nil:
    """The nilpotent part of the solution of A x = b: iterative refinement, two rounds of A0^-1 (b - a x).

    It needs the solution x of the values, and ``solve``, which applies A0^-1 to rows.
    """
    b = b - mm(a, x)
    return (b - mm(a, b.map(solve))).map(solve)


def _like_column(x: Any) -> Any:
    if not isinstance(x, Operand):
        return x.unsqueeze(-1)
    return Operand(x.primal.unsqueeze(-1), *(None if r is None else r.unsqueeze(-1) for r in (x.tangent, x.second)))


@jet_rule(aten._linalg_solve_ex.default, "linalg")
def _solve(pairs: PairSet, op: Any, A: Any, B: Any, *, left: bool = True, check_errors: bool = False) -> Any:
    A0, B0 = primal_of(A), primal_of(B)
    X, *factors = op(A0, B0, left=left, check_errors=check_errors)
    vector = is_vector(A0, B0)
    B, x = (_like_column(B), X.unsqueeze(-1)) if vector else (B, X)
    # not the factors that op returns: they carry no derivative for an outer pass
    LU, pivots, _ = linalg.lu_factor_ex(A0)
    part = _solution(pairs, A, B, x, left, lambda rows: linalg.lu_solve(LU, pivots, rows, left=left))
    return joined(X, part.map(lambda rows: rows.squeeze(-1)) if vector else part), *factors


def _solution(pairs: PairSet, A: Any, B: Any, x: Tensor, left: bool, solve: Callable[[Tensor], Tensor]) -> Nil:
    """The nilpotent part of the x with A x = B, or x A = B; A may be a jet or a nilpotent part."""
    ndim = x.ndim
    a = A if isinstance(A, Nil) else nil(pairs, A, ndim)
    b = nil(pairs, B, ndim)
    if left:
        return _refined(solve, a, x, b)
    return _refined(lambda rows: solve(rows.mT).mT, a.mT, x.mT, b.mT).mT


@jet_rule(aten.linalg_solve_triangular.default, "linalg")
def _solve_triangular(
    pairs: PairSet, op: Any, A: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    A0 = primal_of(A)

    def solve(rows: Tensor) -> Tensor:
        return op(A0, rows, upper=upper, left=left, unitriangular=unitriangular)

    x = solve(primal_of(B))
    a = _triangle(nil(pairs, A, x.ndim), upper, unitriangular)
    return joined(x, _solution(pairs, a, B, x, left, solve))


def _triangle(a: Nil, upper: bool, unitriangular: bool) -> Nil:
    """The part of the matrix that a triangular solve reads."""
    off = int(unitriangular)
    return a.map(lambda rows: rows.triu(off) if upper else rows.tril(-off))


def _triangular_solve(
    B: Tensor, A: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    M = A.mT if transpose else A
    x = linalg.solve_triangular(M, B, upper=upper != transpose, unitriangular=unitriangular)
    return x, A.expand(*x.shape[:-2], *A.shape[-2:]).clone()


composite(aten.triangular_solve.default, _triangular_solve)

# -- Cholesky ------------------------------------------------------------------------------------------------------


def _cholesky_part(pairs: PairSet, A: Operand, L: Tensor) -> Nil:
    """L' = L (I + f), f lower triangular, with f + f^H + f f^H = L^-1 a L^-H, a the Hermitian part as torch has it."""
    e = hermitian(nil(pairs, A)).map(lambda rows: linalg.solve_triangular(L, rows, upper=False))
    e = e.map(lambda rows: linalg.solve_triangular(L.mH, rows, upper=True, left=False))
    f = half_lower(e)
    return mm(L, half_lower(e - mm(f, f.mH)))


@jet_rule(aten.linalg_cholesky_ex.default, "linalg")
def _cholesky_ex(pairs: PairSet, op: Any, A: Operand, *, upper: bool = False, check_errors: bool = False) -> Any:
    factor, info = op(A.primal, upper=upper, check_errors=check_errors)
    part = _cholesky_part(pairs, A, factor.mH if upper else factor)
    return joined(factor, part.mH if upper else part), info


@jet_rule(aten.cholesky.default, "linalg")
def _cholesky(pairs: PairSet, op: Any, A: Operand, upper: bool = False) -> Any:
    factor = op(A.primal, upper)
    part = _cholesky_part(pairs, A, factor.mH if upper else factor)
    return joined(factor, part.mH if upper else part)


@jet_rule(aten.cholesky_solve.default, "linalg")
def _cholesky_solve(pairs: PairSet, op: Any, B: Any, L: Any, upper: bool = False) -> Any:
    """(L L^H) x = B. The value of L is read as triangular, its directions in full, as torch does."""
    L0 = primal_of(L)
    x = op(primal_of(B), L0, upper)
    d, lower = nil(pairs, L, x.ndim), L0
    if upper:
        d, lower = d.mH, L0.mH
    a = mm(d, lower.tril().mH)
    a = a + a.mH + mm(d, d.mH)
    return joined(x, _solution(pairs, a, B, x, True, lambda rows: op(rows, L0, upper)))


def _cholesky_inverse(L: Tensor, upper: bool = False) -> Tensor:
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return torch.cholesky_solve(identity.expand(L.shape), L, upper)


composite(aten.cholesky_inverse.default, _cholesky_inverse)

# -- LU ------------------------------------------------------------------------------------------------------------


def _lu_part(a: Nil, L: Tensor, U: Tensor) -> tuple[Nil, Nil]:
    """The nilpotent parts of the factors of A0 = L U, rows permuted already.

    On the leading square block L' = L (I + l) and U' = (I + u) U, with l strictly lower, u upper triangular and
    l + u + l u = L^-1 a U^-1. The rows below are A2' U'^-1, the columns beyond L'^-1 A2'.
    """
    k = L.shape[-1]
    L1, U1 = L[..., :k, :], U[..., :, :k]

    def under(rows: Tensor) -> Tensor:
        return linalg.solve_triangular(L1, rows, upper=False, unitriangular=True)

    def over(rows: Tensor) -> Tensor:
        return linalg.solve_triangular(U1, rows, upper=True, left=False)

    e = a.map(lambda rows: over(under(rows[..., :k, :k])))
    e = e - mm(strictly_lower(e), upper(e))
    l, u = strictly_lower(e), upper(e)  # noqa: E741
    below = a.map(lambda rows: over(rows[..., k:, :k]))
    w = inverse_less_one(u)
    dL = joined_along([mm(L1, l), below + mm(L[..., k:, :], w) + mm(below, w)], -2)
    beyond = a.map(lambda rows: under(rows[..., :k, k:]))
    w = inverse_less_one(l)
    dU = joined_along([mm(u, U1), beyond + mm(w, U[..., :, k:]) + mm(w, beyond)], -1)
    return dL, dU


@jet_rule(aten.linalg_lu.default, "linalg")
def _lu(pairs: PairSet, op: Any, A: Operand, *, pivot: bool = True) -> Any:
    P, L, U = op(A.primal, pivot=pivot)
    a = nil(pairs, A)
    dL, dU = _lu_part(mm(P.mT, a) if pivot else a, L, U)
    return P, joined(L, dL), joined(U, dU)


@jet_rule(aten.linalg_lu_factor_ex.default, "linalg")
def _lu_factor(pairs: PairSet, op: Any, A: Operand, *, pivot: bool = True, check_errors: bool = False) -> Any:
    LU, pivots, info = op(A.primal, pivot=pivot, check_errors=check_errors)
    P, L, U = torch.lu_unpack(LU, pivots)
    dL, dU = _lu_part(mm(P.mT, nil(pairs, A)), L, U)
    (m, n), k = LU.shape[-2:], L.shape[-1]
    packed = dL.map(lambda rows: pad(rows, (0, n - k))) + dU.map(lambda rows: pad(rows, (0, 0, 0, m - k)))
    return joined(LU, packed), pivots, info


@jet_rule(aten.lu_unpack.default, "linalg")
def _lu_unpack(
    pairs: PairSet, op: Any, LU: Operand, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> Any:
    P, L, U = op(LU.primal, pivots, unpack_data, unpack_pivots)
    if not unpack_data:
        return P, L, U
    k, d = L.shape[-1], nil(pairs, LU)
    dL = d.map(lambda rows: rows[..., :, :k].tril(-1))
    return P, joined(L, dL), joined(U, d.map(lambda rows: rows[..., :k, :].triu()))


@jet_rule(aten.linalg_lu_solve.default, "linalg")
def _lu_solve(
    pairs: PairSet, op: Any, LU: Any, pivots: Tensor, B: Any, *, left: bool = True, adjoint: bool = False
) -> Any:
    """A x = B for A = P L U, whose nilpotent part is P (l U + L u + l u)."""
    LU0 = primal_of(LU)

    def solve(rows: Tensor) -> Tensor:
        return op(LU0, pivots, rows, left=left, adjoint=adjoint)

    x = solve(primal_of(B))
    P, L, U = torch.lu_unpack(LU0, pivots)
    d = nil(pairs, LU, x.ndim)
    l, u = strictly_lower(d), upper(d)  # noqa: E741
    a = mm(P, mm(l, U) + mm(L, u) + mm(l, u))
    return joined(x, _solution(pairs, a.mH if adjoint else a, B, x, left, solve))


# -- QR and reflectors ---------------------------------------------------------------------------------------------


def _qr_part(a: Nil, Q: Tensor, R: Tensor) -> tuple[Nil, Nil]:
    """The nilpotent parts of the factors of a tall A0 = Q R.

    With c = a R^-1, Q + c = Q' (I + u) for an upper triangular u with a real diagonal, so
    u + u^H + u^H u = Q^H c + c^H Q + c^H c.
    """
    c = a.map(lambda rows: linalg.solve_triangular(R, rows, upper=True, left=False))
    g = mm(Q.mH, c)
    g = g + g.mH + mm(c.mH, c)
    u = half_lower(g).mH
    u = half_lower(g - mm(u.mH, u)).mH
    w = inverse_less_one(u)
    return c + mm(Q, w) + mm(c, w), mm(u, R)


@jet_rule(aten.linalg_qr.default, "linalg")
def _qr(pairs: PairSet, op: Any, A: Operand, mode: str = "reduced") -> Any:
    m, n = A.primal.shape[-2:]
    if mode == "complete" and m > n:
        raise UnsupportedProgram(
            f"torch.linalg.qr(A, mode='complete') of a {m} x {n} matrix has no derivative, because the last {m - n} "
            "columns of Q are an arbitrary basis; expected mode='reduced'."
        )
    Q, R = op(A.primal, "reduced")
    k, a = min(m, n), nil(pairs, A)
    dQ, dR = _qr_part(a.map(lambda rows: rows[..., :k]), Q, R[..., :k])
    if n > k:  # the columns beyond the square block: R2 = Q^H A2
        a2 = a.map(lambda rows: rows[..., k:])
        dR = joined_along([dR, mm(Q.mH, a2) + mm(dQ.mH, A.primal[..., k:]) + mm(dQ.mH, a2)], -1)
    return (Q.new_empty(0) if mode == "r" else joined(Q, dQ)), joined(R, dR)


def _reflectors(A: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """V and T with H_1 ... H_k = I - V T V^H, where H_i = I - tau_i v_i v_i^H.

    T = (I + D W)^-1 D for D = diag(tau) and W the strict upper triangle of V^H V: no division by tau.
    """
    k = tau.shape[-1]
    identity = torch.eye(A.shape[-2], k, dtype=A.dtype, device=A.device)
    V = A[..., :k].tril(-1) + identity
    DW = tau.unsqueeze(-1) * (V.mH @ V).triu(1)
    return V, linalg.solve_triangular(DW, torch.diag_embed(tau), upper=True, unitriangular=True)


def _householder_product(A: Tensor, tau: Tensor) -> Tensor:
    V, T = _reflectors(A, tau)
    n = A.shape[-1]
    return torch.eye(A.shape[-2], n, dtype=A.dtype, device=A.device) - V @ (T @ V[..., :n, :].mH)


composite(aten.linalg_householder_product.default, _householder_product)


def _ormqr(A: Tensor, tau: Tensor, C: Tensor, left: bool = True, transpose: bool = False) -> Tensor:
    V, T = _reflectors(A, tau)
    T = T.mH if transpose else T
    return C - V @ (T @ (V.mH @ C)) if left else C - ((C @ V) @ T) @ V.mH


composite(aten.ormqr.default, _ormqr)
