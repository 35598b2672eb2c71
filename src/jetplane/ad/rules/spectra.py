"""Rules of eigenvalues, singular values and what follows from them. The technique is explained in nilpotent.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedProgram
from ..algebra.families import composite, jet_rule
from ..algebra.jet import Operand, PairSet
from .nilpotent import (
    Nil,
    hermitian,
    is_vector,
    joined,
    joined_along,
    mm,
    nil,
)
from .reductions import squared_size

aten = torch.ops.aten
linalg = torch.linalg

# -- spectra -------------------------------------------------------------------------------------------------------


def _over_gaps(x: Tensor) -> Tensor:
    """1 / (x_j - x_i) off the diagonal, zero on it; infinite where values repeat and no derivative exists."""
    gaps = x.unsqueeze(-2) - x.unsqueeze(-1)
    diagonal = torch.eye(x.shape[-1], dtype=torch.bool, device=x.device)
    return torch.where(diagonal, 0.0, 1 / torch.where(diagonal, 1.0, gaps))


def _minus_half_norms(z: Nil) -> Nil:
    """The diagonal correction that keeps columns normalised: -diag(z^H z) / 2."""
    return (z.conj * z).map(lambda rows: -torch.diag_embed(rows.sum(-2)) / 2)


@jet_rule(aten._linalg_eigh.default, "linalg")
def _eigh(pairs: PairSet, op: Any, A: Operand, UPLO: str = "L", compute_v: bool = True) -> Any:
    """V' = V (I + z), Lambda' = Lambda + l, with z Lambda - Lambda z + l = e + e z - z l for e = V^H a V.

    The Hermitian part of a direction counts: the matrix is Hermitian, whichever triangle is read. The phase of a
    complex vector is free, and here it does not turn.
    """
    values, V = op(A.primal, UPLO, True)
    e = mm(V.mH, hermitian(nil(pairs, A)), V)
    over_gaps = _over_gaps(values)
    z = e * over_gaps
    w = e + mm(e, z) - z * e.diagonal.map(lambda rows: rows.unsqueeze(-2))
    jet = joined(values, w.diagonal.real.map(torch.clone))  # a clone: rows of a vector lie densely in memory
    if not compute_v:
        return jet, values.new_empty(0)
    return jet, joined(V, mm(V, w * over_gaps + _minus_half_norms(z)))


def _svd_parts(a: Nil, U: Tensor, S: Tensor, V: Tensor) -> tuple[Nil, Nil, Nil]:
    """The nilpotent parts x, s, y of U, S, V (thin) for A0 = U S V^H.

    A V = U S and A^H U = V S read, with r = a V + a y - x s and t = a^H U + a^H x - y s,
        U S V^H y - x S = U s - r        V S U^H x - y S = V s - t.
    Within the span of U and V these are pairs of equations for (x_ij, y_ij); out of it x = r / S and y = t / S. Of the
    phases of a complex pair of columns the difference is theirs, and turns both by halves; what turns them alike is
    free.
    """
    m, n, k = U.shape[-2], V.shape[-2], S.shape[-1]
    S2 = S * S
    over_gaps = _over_gaps(S2)
    row, column = S.unsqueeze(-1), S.unsqueeze(-2)  # sigma_i, sigma_j

    def step(r: Nil, t: Nil) -> tuple[Nil, Nil, Nil]:
        ru, tv = mm(U.mH, r), mm(V.mH, t)
        within_x, within_y = (ru * column + tv * row) * over_gaps, (ru * row + tv * column) * over_gaps
        if U.is_complex():
            turn = (ru - tv).diagonal.map(lambda rows: torch.diag_embed(rows.imag * (0.25j / S)))
            within_x, within_y = within_x + turn, within_y - turn
        x, y = mm(U, within_x), mm(V, within_y)
        if m > k:
            x = x + (r - mm(U, ru)) * (1 / column)
        if n > k:
            y = y + (t - mm(V, tv)) * (1 / column)
        return x, ((ru.diagonal + tv.diagonal) * 0.5).real, y

    r, t = mm(a, V), mm(a.mH, U)
    x, s, y = step(r, t)
    scale = s.map(lambda rows: rows.unsqueeze(-2))
    dx, ds, dy = step(r + mm(a, y) - x * scale, t + mm(a.mH, x) - y * scale)
    return dx + mm(U, _minus_half_norms(x)), ds, dy + mm(V, _minus_half_norms(y))


def _complement_part(x: Nil, U: Tensor, rest: Tensor) -> Nil:
    """The nilpotent part of an orthonormal basis ``rest`` of the complement of U' = U + x.

    A basis is fixed up to a rotation; this one does not rotate: rest' = (I - U' U'^H) rest, normalised.
    """
    c = mm(x.mH, rest)
    return mm(rest, mm(c.mH, c)) * 0.5 - mm(U, c) - mm(x, c)


@jet_rule(aten._linalg_svd.default, "linalg")
def _svd(
    pairs: PairSet, op: Any, A: Operand, full_matrices: bool = False, compute_uv: bool = True, *, driver: Any = None
) -> Any:
    U, S, Vh = op(A.primal, full_matrices and compute_uv, True, driver=driver)
    k = S.shape[-1]
    thin_U, thin_V = U[..., :k], Vh[..., :k, :].mH
    x, s, y = _svd_parts(nil(pairs, A), thin_U, S, thin_V)
    if not compute_uv:
        return U.new_empty(0), joined(S, s), U.new_empty(0)
    if U.shape[-1] > k:
        x = joined_along([x, _complement_part(x, thin_U, U[..., k:])], -1)
    if Vh.shape[-2] > k:
        y = joined_along([y, _complement_part(y, thin_V, Vh[..., k:, :].mH)], -1)
    return joined(U, x), joined(S, s), joined(Vh, y.mH)


# -- eigenvalues of any matrix -------------------------------------------------------------------------------------


def _eig_parts(pairs: PairSet, A: Operand, values: Tensor, V: Tensor) -> tuple[Nil, Nil]:
    """As for eigh with e = V^-1 a V; the columns of V (I + z) are normalised after that, and their phases stay."""
    a = nil(pairs, A).map(lambda rows: rows.to(V.dtype))
    e = mm(a, V).map(lambda rows: linalg.solve(V, rows))
    over_gaps = _over_gaps(values)
    z = e * over_gaps
    w = e + mm(e, z) - z * e.diagonal.map(lambda rows: rows.unsqueeze(-2))
    p = mm(V, w * over_gaps)
    longer = (p * V.conj()).map(lambda rows: 2 * rows.real.sum(-2, keepdim=True))
    longer = longer + (p.conj * p).map(lambda rows: rows.real.sum(-2, keepdim=True))
    shrink = (longer * longer) * 0.375 - longer * 0.5  # (1 + longer)^(-1/2) - 1
    return w.diagonal.map(torch.clone), p + shrink * V + p * shrink


@jet_rule(aten.linalg_eig.default, "linalg")
def _eig(pairs: PairSet, op: Any, A: Operand) -> Any:
    values, V = op(A.primal)
    changes, turns = _eig_parts(pairs, A, values, V)
    return joined(values, changes), joined(V, turns)


@jet_rule(aten._linalg_eigvals.default, "linalg")
def _eigvals(pairs: PairSet, op: Any, A: Operand) -> Any:
    values, V = linalg.eig(A.primal)
    return joined(values, _eig_parts(pairs, A, values, V)[0])


# -- pseudo-inverse and least squares ------------------------------------------------------------------------------


def _pinv(A: Tensor, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Tensor:
    """The pseudo-inverse at constant rank, as an identity that holds for the perturbed matrix too.

    With fixed frames U1, V1, S of the value, C = A V1 S^-1, R = S^-1 U1^H A and M = S^-1 U1^H A V1 S^-1,
        A = C M^-1 R    and    A^+ = R^+ M C^+ = R^H (R R^H)^-1 M (C^H C)^-1 C^H.
    C and R have orthonormal columns and rows in value, so nothing is lost to squaring.
    """
    if A.numel() == 0:
        return A.mH.clone()
    value = A.detach()
    if hermitian:
        _check_symmetric(value)
    U, S, Vh = linalg.svd(value, full_matrices=False)
    kept = _cutoff(value, S, atol, rtol) < S
    frame = torch.where(kept, 1 / torch.where(kept, S, 1.0), 0.0)
    left, right = frame.unsqueeze(-1) * U.mH, Vh.mH * frame.unsqueeze(-2)
    C, R = A @ right, left @ A
    dropped = torch.diag_embed((~kept).to(A.dtype))  # ones where C and R are zero, so that the solves are regular
    inner = linalg.solve(R @ R.mH + dropped, left @ A @ right)
    return R.mH @ inner @ linalg.solve(C.mH @ C + dropped, C.mH)


def _check_symmetric(value: Tensor) -> None:
    # torch reads one triangle for the value and both for the derivative
    if not torch.allclose(value, value.mH, rtol=1e-3, atol=1e-5 * float(value.abs().max()), equal_nan=True):
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
    vector = is_vector(A, B)
    right = B.unsqueeze(-1) if vector else B
    # the driver gels takes any matrix for one of full rank
    X = _pinv(A, rtol=0.0 if driver == "gels" else rcond) @ right
    if residuals.numel():
        residuals = squared_size(A @ X - right).sum(-2).reshape(residuals.shape)
    return (X.squeeze(-1) if vector else X), residuals, *others


composite(aten.linalg_lstsq.default, _lstsq)
