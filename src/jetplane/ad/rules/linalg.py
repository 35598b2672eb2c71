"""Rules of linear algebra: solves, factorisations, spectra, determinants.

The technique. A perturbed matrix is a value plus a *nilpotent* part, A = A0 + a, where a product of three nilpotent
parts vanishes. The equation that defines a factorisation is solved for the nilpotent part of the factors by a fixed
point iteration around the factors of A0, and two rounds are exact through second order: the first round is exact to
first order, and each round gains one.

The rules read the value A0 with its own derivatives (an outer pass, autograd), so they nest and can be backpropagated
through. Real matrices only: the engine refuses complex values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...errors import UnsupportedProgram
from ..families import align, composite, jet_rule, primal_of, spread, total
from ..jet import Jet, PairSet
from .products import MatMul

aten = torch.ops.aten
linalg = torch.linalg

# -- nilpotent parts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Nil:
    """The nilpotent part of a jet: its rows, without the value. Matrices are the last two axes."""

    pairs: PairSet
    tangent: Tensor | None = None  # (K, *S), None for zero
    second: Tensor | None = None  # (rows, *S), None for zero

    def map(self, linear: Callable[[Tensor], Tensor]) -> Nil:
        """A linear function, one that leaves leading axes alone, of the rows."""
        tangent, second = (None if rows is None else linear(rows) for rows in (self.tangent, self.second))
        return Nil(self.pairs, tangent, second)

    @property
    def mT(self) -> Nil:
        return self.map(lambda rows: rows.mT)

    @property
    def diagonal(self) -> Nil:
        return self.map(lambda rows: rows.diagonal(dim1=-2, dim2=-1))

    @property
    def trace(self) -> Nil:
        return self.diagonal.map(lambda rows: rows.sum(-1))

    def __neg__(self) -> Nil:
        return self.map(torch.neg)

    def __add__(self, other: Nil) -> Nil:
        return Nil(self.pairs, total((self.tangent, other.tangent)), total((self.second, other.second)))

    def __sub__(self, other: Nil) -> Nil:
        return self + -other

    def __mul__(self, other: Nil | Tensor | float) -> Nil:
        if not isinstance(other, Nil):
            return self.map(lambda rows: rows * other)
        if self.tangent is None or other.tangent is None or not self.pairs.rows:
            return Nil(self.pairs)
        return Nil(self.pairs, None, self.pairs.cross(self.tangent, other.tangent))


def mm(*factors: Any) -> Any:
    """The matrix product of values and nilpotent parts."""
    left, *rest = factors
    for right in rest:
        left = _mm(left, right)
    return left


def _mm(a: Any, b: Any) -> Any:
    if isinstance(a, Nil) and isinstance(b, Nil):
        if a.tangent is None or b.tangent is None or not a.pairs.rows:
            return Nil(a.pairs)
        return Nil(a.pairs, None, a.pairs.bilinear(MatMul(), a.tangent, b.tangent))
    if isinstance(a, Nil):
        return a.map(lambda rows: torch.matmul(rows, b))
    return b.map(lambda rows: torch.matmul(a, rows)) if isinstance(b, Nil) else torch.matmul(a, b)


def nil(pairs: PairSet, x: Any, ndim: int | None = None) -> Nil:
    """The nilpotent part of an operand, zero for a constant, with ``ndim`` axes where batches broadcast."""
    if not isinstance(x, Jet):
        return Nil(pairs)
    ndim = x.primal.ndim if ndim is None else ndim
    return Nil(pairs, align(x.tangent, ndim), align(x.second, ndim))


def joined(value: Tensor, part: Nil) -> Jet:
    """The jet of a value and its nilpotent part."""
    return Jet(value, spread(part.tangent, value), spread(part.second, value))


def _cat(parts: list[Nil], dim: int) -> Nil:
    def along(rows: list[Any]) -> Tensor | None:
        return None if all(r is None for r in rows) else torch.cat(rows, dim)

    return Nil(parts[0].pairs, along([p.tangent for p in parts]), along([p.second for p in parts]))


def _strictly_lower(x: Nil) -> Nil:
    return x.map(lambda rows: rows.tril(-1))


def _upper(x: Nil) -> Nil:
    return x.map(torch.triu)


def _half_lower(x: Nil) -> Nil:
    """The triangular T with T + T^T = x, for a symmetric x."""
    return x.map(lambda rows: rows.tril() - torch.diag_embed(rows.diagonal(dim1=-2, dim2=-1)) / 2)


def _symmetric(x: Nil) -> Nil:
    return (x + x.mT) * 0.5


def _inverse_less_one(u: Nil) -> Nil:
    """(I + u)^-1 - I = -u + u u."""
    return mm(u, u) - u


# -- inverse and solve ---------------------------------------------------------------------------------------------


@jet_rule(aten.linalg_inv_ex.default, "linalg")
def _inv(pairs: PairSet, op: Any, A: Jet, *, check_errors: bool = False) -> Any:
    """(A0 + a)^-1 = X - X a X + X a X a X."""
    X, info = op(A.primal, check_errors=check_errors)
    f = mm(X, nil(pairs, A))
    return joined(X, mm(_inverse_less_one(f), X)), info


def _refined(solve: Callable[[Tensor], Tensor], a: Nil, x: Tensor, b: Nil) -> Nil:
    """The nilpotent part of the solution of A x = b: iterative refinement, two rounds of A0^-1 (b - a x).

    It needs the solution x of the values, and ``solve``, which applies A0^-1 to rows.
    """
    b = b - mm(a, x)
    return (b - mm(a, b.map(solve))).map(solve)


def _is_vector(A: Tensor, B: Tensor) -> bool:
    """Whether torch.linalg.solve and lstsq take B for a batch of vectors."""
    return B.ndim == 1 or (A.ndim - 1 == B.ndim and A.shape[:-1] == B.shape)


def _like_column(x: Any) -> Any:
    if not isinstance(x, Jet):
        return x.unsqueeze(-1)
    return Jet(x.primal.unsqueeze(-1), *(None if r is None else r.unsqueeze(-1) for r in (x.tangent, x.second)))


@jet_rule(aten._linalg_solve_ex.default, "linalg")
def _solve(pairs: PairSet, op: Any, A: Any, B: Any, *, left: bool = True, check_errors: bool = False) -> Any:
    A0, B0 = primal_of(A), primal_of(B)
    X, *factors = op(A0, B0, left=left, check_errors=check_errors)
    vector = _is_vector(A0, B0)
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


def _cholesky_part(pairs: PairSet, A: Jet, L: Tensor) -> Nil:
    """L' = L (I + f), f lower triangular, with f + f^T + f f^T = L^-1 a L^-T, a the symmetric part as torch has it."""
    e = _symmetric(nil(pairs, A)).map(lambda rows: linalg.solve_triangular(L, rows, upper=False))
    e = e.map(lambda rows: linalg.solve_triangular(L.mT, rows, upper=True, left=False))
    f = _half_lower(e)
    return mm(L, _half_lower(e - mm(f, f.mT)))


@jet_rule(aten.linalg_cholesky_ex.default, "linalg")
def _cholesky_ex(pairs: PairSet, op: Any, A: Jet, *, upper: bool = False, check_errors: bool = False) -> Any:
    factor, info = op(A.primal, upper=upper, check_errors=check_errors)
    part = _cholesky_part(pairs, A, factor.mT if upper else factor)
    return joined(factor, part.mT if upper else part), info


@jet_rule(aten.cholesky.default, "linalg")
def _cholesky(pairs: PairSet, op: Any, A: Jet, upper: bool = False) -> Any:
    factor = op(A.primal, upper)
    part = _cholesky_part(pairs, A, factor.mT if upper else factor)
    return joined(factor, part.mT if upper else part)


@jet_rule(aten.cholesky_solve.default, "linalg")
def _cholesky_solve(pairs: PairSet, op: Any, B: Any, L: Any, upper: bool = False) -> Any:
    """(L L^T) x = B. The value of L is read as triangular, its directions in full, as torch does."""
    L0 = primal_of(L)
    x = op(primal_of(B), L0, upper)
    d, lower = nil(pairs, L, x.ndim), L0
    if upper:
        d, lower = d.mT, L0.mT
    a = mm(d, lower.tril().mT)
    a = a + a.mT + mm(d, d.mT)
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
    e = e - mm(_strictly_lower(e), _upper(e))
    l, u = _strictly_lower(e), _upper(e)  # noqa: E741
    below = a.map(lambda rows: over(rows[..., k:, :k]))
    w = _inverse_less_one(u)
    dL = _cat([mm(L1, l), below + mm(L[..., k:, :], w) + mm(below, w)], -2)
    beyond = a.map(lambda rows: under(rows[..., :k, k:]))
    w = _inverse_less_one(l)
    dU = _cat([mm(u, U1), beyond + mm(w, U[..., :, k:]) + mm(w, beyond)], -1)
    return dL, dU


@jet_rule(aten.linalg_lu.default, "linalg")
def _lu(pairs: PairSet, op: Any, A: Jet, *, pivot: bool = True) -> Any:
    P, L, U = op(A.primal, pivot=pivot)
    a = nil(pairs, A)
    dL, dU = _lu_part(mm(P.mT, a) if pivot else a, L, U)
    return P, joined(L, dL), joined(U, dU)


@jet_rule(aten.linalg_lu_factor_ex.default, "linalg")
def _lu_factor(pairs: PairSet, op: Any, A: Jet, *, pivot: bool = True, check_errors: bool = False) -> Any:
    LU, pivots, info = op(A.primal, pivot=pivot, check_errors=check_errors)
    P, L, U = torch.lu_unpack(LU, pivots)
    dL, dU = _lu_part(mm(P.mT, nil(pairs, A)), L, U)
    (m, n), k = LU.shape[-2:], L.shape[-1]
    packed = dL.map(lambda rows: pad(rows, (0, n - k))) + dU.map(lambda rows: pad(rows, (0, 0, 0, m - k)))
    return joined(LU, packed), pivots, info


@jet_rule(aten.lu_unpack.default, "linalg")
def _lu_unpack(
    pairs: PairSet, op: Any, LU: Jet, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
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
    l, u = _strictly_lower(d), _upper(d)  # noqa: E741
    a = mm(P, mm(l, U) + mm(L, u) + mm(l, u))
    return joined(x, _solution(pairs, a.mT if adjoint else a, B, x, left, solve))


# -- QR and reflectors ---------------------------------------------------------------------------------------------


def _qr_part(a: Nil, Q: Tensor, R: Tensor) -> tuple[Nil, Nil]:
    """The nilpotent parts of the factors of a tall A0 = Q R.

    With c = a R^-1, Q + c = Q' (I + u) for an upper triangular u, so u + u^T + u^T u = Q^T c + c^T Q + c^T c.
    """
    c = a.map(lambda rows: linalg.solve_triangular(R, rows, upper=True, left=False))
    g = mm(Q.mT, c)
    g = g + g.mT + mm(c.mT, c)
    u = _half_lower(g).mT
    u = _half_lower(g - mm(u.mT, u)).mT
    w = _inverse_less_one(u)
    return c + mm(Q, w) + mm(c, w), mm(u, R)


@jet_rule(aten.linalg_qr.default, "linalg")
def _qr(pairs: PairSet, op: Any, A: Jet, mode: str = "reduced") -> Any:
    m, n = A.primal.shape[-2:]
    if mode == "complete" and m > n:
        raise UnsupportedProgram(
            f"torch.linalg.qr(A, mode='complete') of a {m} x {n} matrix has no derivative, because the last {m - n} "
            "columns of Q are an arbitrary basis; expected mode='reduced'."
        )
    Q, R = op(A.primal, "reduced")
    k, a = min(m, n), nil(pairs, A)
    dQ, dR = _qr_part(a.map(lambda rows: rows[..., :k]), Q, R[..., :k])
    if n > k:  # the columns beyond the square block: R2 = Q^T A2
        a2 = a.map(lambda rows: rows[..., k:])
        dR = _cat([dR, mm(Q.mT, a2) + mm(dQ.mT, A.primal[..., k:]) + mm(dQ.mT, a2)], -1)
    return (Q.new_empty(0) if mode == "r" else joined(Q, dQ)), joined(R, dR)


def _reflectors(A: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """V and T with H_1 ... H_k = I - V T V^T, where H_i = I - tau_i v_i v_i^T.

    T = (I + D W)^-1 D for D = diag(tau) and W the strict upper triangle of V^T V: no division by tau.
    """
    k = tau.shape[-1]
    identity = torch.eye(A.shape[-2], k, dtype=A.dtype, device=A.device)
    V = A[..., :k].tril(-1) + identity
    DW = tau.unsqueeze(-1) * (V.mT @ V).triu(1)
    return V, linalg.solve_triangular(DW, torch.diag_embed(tau), upper=True, unitriangular=True)


def _householder_product(A: Tensor, tau: Tensor) -> Tensor:
    V, T = _reflectors(A, tau)
    n = A.shape[-1]
    return torch.eye(A.shape[-2], n, dtype=A.dtype, device=A.device) - V @ (T @ V[..., :n, :].mT)


composite(aten.linalg_householder_product.default, _householder_product)


def _ormqr(A: Tensor, tau: Tensor, C: Tensor, left: bool = True, transpose: bool = False) -> Tensor:
    V, T = _reflectors(A, tau)
    T = T.mT if transpose else T
    return C - V @ (T @ (V.mT @ C)) if left else C - ((C @ V) @ T) @ V.mT


composite(aten.ormqr.default, _ormqr)

# -- spectra -------------------------------------------------------------------------------------------------------


def _over_gaps(x: Tensor) -> Tensor:
    """1 / (x_j - x_i) off the diagonal, zero on it; infinite where values repeat and no derivative exists."""
    gaps = x.unsqueeze(-2) - x.unsqueeze(-1)
    diagonal = torch.eye(x.shape[-1], dtype=torch.bool, device=x.device)
    return torch.where(diagonal, 0.0, 1 / torch.where(diagonal, 1.0, gaps))


def _minus_half_norms(z: Nil) -> Nil:
    """The diagonal correction that keeps columns normalised: -diag(z^T z) / 2."""
    return (z * z).map(lambda rows: -torch.diag_embed(rows.sum(-2)) / 2)


@jet_rule(aten._linalg_eigh.default, "linalg")
def _eigh(pairs: PairSet, op: Any, A: Jet, UPLO: str = "L", compute_v: bool = True) -> Any:
    """V' = V (I + z), Lambda' = Lambda + l, with z Lambda - Lambda z + l = e + e z - z l for e = V^T a V.

    The symmetric part of a direction counts: the matrix is symmetric, whichever triangle is read.
    """
    values, V = op(A.primal, UPLO, True)
    e = mm(V.mT, _symmetric(nil(pairs, A)), V)
    over_gaps = _over_gaps(values)
    z = e * over_gaps
    w = e + mm(e, z) - z * e.diagonal.map(lambda rows: rows.unsqueeze(-2))
    jet = joined(values, w.diagonal.map(torch.clone))  # a clone: rows of a vector lie densely in memory
    if not compute_v:
        return jet, values.new_empty(0)
    return jet, joined(V, mm(V, w * over_gaps + _minus_half_norms(z)))


def _svd_parts(a: Nil, U: Tensor, S: Tensor, V: Tensor) -> tuple[Nil, Nil, Nil]:
    """The nilpotent parts x, s, y of U, S, V (thin) for A0 = U S V^T.

    A V = U S and A^T U = V S read, with r = a V + a y - x s and t = a^T U + a^T x - y s,
        U S V^T y - x S = U s - r        V S U^T x - y S = V s - t.
    Within the span of U and V these are pairs of equations for (x_ij, y_ij); out of it x = r / S and y = t / S.
    """
    m, n, k = U.shape[-2], V.shape[-2], S.shape[-1]
    S2 = S * S
    over_gaps = _over_gaps(S2)
    row, column = S.unsqueeze(-1), S.unsqueeze(-2)  # sigma_i, sigma_j

    def step(r: Nil, t: Nil) -> tuple[Nil, Nil, Nil]:
        ru, tv = mm(U.mT, r), mm(V.mT, t)
        x = mm(U, (ru * column + tv * row) * over_gaps)
        y = mm(V, (ru * row + tv * column) * over_gaps)
        if m > k:
            x = x + (r - mm(U, ru)) * (1 / column)
        if n > k:
            y = y + (t - mm(V, tv)) * (1 / column)
        return x, (ru.diagonal + tv.diagonal) * 0.5, y

    r, t = mm(a, V), mm(a.mT, U)
    x, s, y = step(r, t)
    scale = s.map(lambda rows: rows.unsqueeze(-2))
    dx, ds, dy = step(r + mm(a, y) - x * scale, t + mm(a.mT, x) - y * scale)
    return dx + mm(U, _minus_half_norms(x)), ds, dy + mm(V, _minus_half_norms(y))


def _complement_part(x: Nil, U: Tensor, rest: Tensor) -> Nil:
    """The nilpotent part of an orthonormal basis ``rest`` of the complement of U' = U + x.

    A basis is fixed up to a rotation; this one does not rotate: rest' = (I - U' U'^T) rest, normalised.
    """
    c = mm(x.mT, rest)
    return mm(rest, mm(c.mT, c)) * 0.5 - mm(U, c) - mm(x, c)


@jet_rule(aten._linalg_svd.default, "linalg")
def _svd(
    pairs: PairSet, op: Any, A: Jet, full_matrices: bool = False, compute_uv: bool = True, *, driver: Any = None
) -> Any:
    U, S, Vh = op(A.primal, full_matrices and compute_uv, True, driver=driver)
    k = S.shape[-1]
    thin_U, thin_V = U[..., :k], Vh[..., :k, :].mT
    x, s, y = _svd_parts(nil(pairs, A), thin_U, S, thin_V)
    if not compute_uv:
        return U.new_empty(0), joined(S, s), U.new_empty(0)
    if U.shape[-1] > k:
        x = _cat([x, _complement_part(x, thin_U, U[..., k:])], -1)
    if Vh.shape[-2] > k:
        y = _cat([y, _complement_part(y, thin_V, Vh[..., k:, :].mT)], -1)
    return joined(U, x), joined(S, s), joined(Vh, y.mT)


# -- pseudo-inverse and least squares ------------------------------------------------------------------------------


def _pinv(A: Tensor, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Tensor:
    """The pseudo-inverse at constant rank, as an identity that holds for the perturbed matrix too.

    With fixed frames U1, V1, S of the value, C = A V1 S^-1, R = S^-1 U1^T A and M = S^-1 U1^T A V1 S^-1,
        A = C M^-1 R    and    A^+ = R^+ M C^+ = R^T (R R^T)^-1 M (C^T C)^-1 C^T.
    C and R have orthonormal columns and rows in value, so nothing is lost to squaring.
    """
    if A.numel() == 0:
        return A.mT.clone()
    value = A.detach()
    if hermitian:
        _check_symmetric(value)
    U, S, Vh = linalg.svd(value, full_matrices=False)
    kept = _cutoff(value, S, atol, rtol) < S
    frame = torch.where(kept, 1 / torch.where(kept, S, 1.0), 0.0)
    left, right = frame.unsqueeze(-1) * U.mT, Vh.mT * frame.unsqueeze(-2)
    C, R = A @ right, left @ A
    dropped = torch.diag_embed((~kept).to(A.dtype))  # ones where C and R are zero, so that the solves are regular
    inner = linalg.solve(R @ R.mT + dropped, left @ A @ right)
    return R.mT @ inner @ linalg.solve(C.mT @ C + dropped, C.mT)


def _check_symmetric(value: Tensor) -> None:
    # torch reads one triangle for the value and both for the derivative
    if not torch.allclose(value, value.mT, rtol=1e-3, atol=1e-5 * float(value.abs().max()), equal_nan=True):
        raise UnsupportedProgram(
            "torch.linalg.pinv(A, hermitian=True) has no derivative at a matrix that is not symmetric; expected a "
            "symmetric A, for example (A + A.mT) / 2."
        )


def _cutoff(value: Tensor, S: Tensor, atol: Any, rtol: Any) -> Tensor:
    """torch's rule: max(atol, rtol * largest), where rtol is max(m, n) * eps unless atol is given and positive."""
    if atol is None:
        atol = torch.zeros((), dtype=S.dtype, device=S.device)
    if rtol is None:
        default = max(value.shape[-2:]) * torch.finfo(S.dtype).eps
        rtol = torch.where(torch.as_tensor(atol, device=S.device) > 0, 0.0, default)
    atol, rtol = (torch.as_tensor(t, device=S.device).unsqueeze(-1).to(S.dtype) for t in (atol, rtol))
    return torch.maximum(atol, rtol * S[..., :1])


composite(aten.linalg_pinv.atol_rtol_tensor, _pinv)


def _lstsq(A: Tensor, B: Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    _, residuals, *others = aten.linalg_lstsq.default(A.detach(), B.detach(), rcond, driver=driver)
    vector = _is_vector(A, B)
    right = B.unsqueeze(-1) if vector else B
    # the driver gels takes any matrix for one of full rank
    X = _pinv(A, rtol=0.0 if driver == "gels" else rcond) @ right
    if residuals.numel():
        residuals = (A @ X - right).square().sum(-2).reshape(residuals.shape)
    return (X.squeeze(-1) if vector else X), residuals, *others


composite(aten.linalg_lstsq.default, _lstsq)

# -- determinants --------------------------------------------------------------------------------------------------


@jet_rule(aten._linalg_slogdet.default, "linalg")
def _slogdet(pairs: PairSet, op: Any, A: Jet) -> Any:
    """log |det (A0 (I + e))| = log |det A0| + tr e - tr(e e) / 2."""
    sign, logabsdet, LU, pivots = op(A.primal)
    e = _left_divided(A.primal, nil(pairs, A))
    return sign, joined(logabsdet, e.trace - _trace_of_square(e) * 0.5), LU, pivots


def _left_divided(A: Tensor, a: Nil) -> Nil:
    """A^-1 a, infinite and not an error where A is singular."""
    LU, pivots, _ = linalg.lu_factor_ex(A)
    return a.map(lambda rows: linalg.lu_solve(LU, pivots, rows))


def _trace_of_square(e: Nil) -> Nil:
    return (e * e.mT).map(lambda rows: rows.sum((-2, -1)))


@jet_rule(aten._linalg_det.default, "linalg")
def _det(pairs: PairSet, op: Any, A: Jet) -> Any:
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
    spaced = torch.diag(torch.arange(1, n + 1, dtype=det.dtype, device=det.device))
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
    """det (S + e) = prod S + sum_i e_ii P_i + sum_{i<j} (e_ii e_jj - e_ij e_ji) P_ij, for e = U^T a V.

    P_i and P_ij are the products of S without the i-th, and the i-th and j-th, value: no division.
    """
    U, S, Vh = linalg.svd(A)
    sign = linalg.det((U @ Vh).detach()).sign()
    e = mm(U.mT, a, Vh.mT)
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
def _matrix_exp(pairs: PairSet, op: Any, A: Jet) -> Any:
    """exp' [e] = corner of exp [[A, e], [0, A]], and exp'' [e, f] = Q(e, f) + Q(f, e)."""
    lifted, a = ExpProduct(A.primal), nil(pairs, A)
    part = a.map(lifted)
    if pairs.rows and a.tangent is not None:
        part = part + Nil(pairs, None, pairs.bilinear(lifted, a.tangent, a.tangent))
    return joined(op(A.primal), part)
