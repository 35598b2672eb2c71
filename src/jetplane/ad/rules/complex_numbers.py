"""What is known of complex numbers.

A complex tensor is a pair of real ones, and so are its rows: a row holds the derivative of the real part, and i times
that of the imaginary one. An operation that is linear over the real numbers is so for complex ones, be it conj, a
Fourier transform or a product with a conjugate, and its rule stands (``registry.plan_for_complex``). The rule of a
function of one complex variable, with f' and f'' as formulas, stands where f is holomorphic and the formulas hold on
all of its branch: these are listed here. Those of abs, angle and sgn, which have no complex derivative, are written
out, and all others are missing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..algebra.families import (
    Derivative,
    chain,
    complex_composite,
    complex_rule,
    composite,
    holds_for_complex,
    linear,
    primals_of,
    total,
)
from ..algebra.jet import Operand, PairSet
from .reductions import scan

aten = torch.ops.aten
where = torch.where

# -- rules that hold as they stand -----------------------------------------------------------------------------------

holds_for_complex(
    *(aten.neg, aten.reciprocal, aten.sqrt, aten.rsqrt, aten.exp, aten.exp2, aten.expm1, aten.log, aten.log2),
    *(aten.log10, aten.log1p, aten.sin, aten.cos, aten.tan, aten.asin, aten.acos, aten.atan, aten.sinh, aten.cosh),
    *(aten.tanh, aten.asinh, aten.atanh, aten.sinc, aten.sigmoid, aten.silu),
    *(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar),
    *(aten.add, aten.sub, aten.rsub, aten.mul, aten.div.Tensor, aten.div.Scalar, aten.addcmul, aten.addcdiv, aten.lerp),
    aten.logsumexp,
)
# programs of operations that have rules, and the sizes of numbers by their absolute values
holds_for_complex(
    *(aten.copy, aten.fill.Tensor, aten.as_strided_copy, aten.unbind_copy, aten.as_strided_scatter),
    *(aten.prod.dim_int, aten.prod.default, aten.cumprod, aten.nansum),
    *(aten.ldexp, aten.linear, aten.addmv, aten.addbmm, aten.addr, aten.ger, aten._trilinear),
    *(aten.var_mean.correction, aten.std_mean.correction, aten.var.correction, aten.std.correction),
    *(aten.linalg_vector_norm, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype, aten.norm.Scalar),
    *(aten.norm.ScalarOpt_dtype, aten.dist, aten.renorm, aten._weight_norm_interface),
)
# linear algebra: what is holomorphic in the matrix, or has its adjoints where real matrices have their transposes
holds_for_complex(
    *(aten.linalg_inv_ex, aten._linalg_solve_ex, aten.linalg_solve_triangular, aten.triangular_solve),
    *(aten.linalg_lu, aten.linalg_lu_factor_ex, aten.lu_unpack, aten.linalg_lu_solve, aten.linalg_matrix_exp),
    *(aten.linalg_cholesky_ex, aten.cholesky, aten.cholesky_solve, aten.cholesky_inverse, aten.linalg_qr),
    *(aten.linalg_householder_product, aten.ormqr, aten._linalg_eigh, aten._linalg_svd, aten._linalg_slogdet),
    *(aten._linalg_det, aten.linalg_eig, aten._linalg_eigvals, aten.linalg_pinv.atol_rtol_tensor, aten.linalg_lstsq),
)

# -- from real numbers and back --------------------------------------------------------------------------------------

linear(aten.complex, over=("real", "imag"))
linear(aten._conj_physical)
linear(aten.conj_physical)
composite(aten.polar, lambda size, angle: torch.complex(size * torch.cos(angle), size * torch.sin(angle)))
for _op in (aten._fft_r2c, aten._fft_c2r, aten._fft_c2c):
    linear(_op, dims="dim")


def _parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The real and the imaginary part."""
    real, imaginary = torch.view_as_real(rows.resolve_conj()).unbind(-1)
    return real, imaginary


def _real(rows: Tensor | None) -> Tensor | None:
    return None if rows is None else _parts(rows)[0]


def _imaginary(rows: Tensor | None) -> Tensor | None:
    return None if rows is None else _parts(rows)[1]


def _turned(rows: Tensor | None, factor: Tensor) -> Tensor | None:
    return None if rows is None else rows * factor


@complex_rule(aten.abs)
def _abs(pairs: PairSet, op: Any, x: Operand) -> Operand:
    """With a_i + i b_i = conj(sgn x) x_i: |x|_i = a_i, |x|_ij = Re(conj(sgn x) x_ij) + b_i b_j / |x|. At zero 0."""
    y = op(x.primal)
    direction = torch.conj_physical(torch.sgn(x.primal))
    tangent, second = _turned(x.tangent, direction), _turned(x.second, direction) if pairs.rows else None
    bent = None
    if pairs.rows and tangent is not None:
        across = _parts(tangent)[1]
        bent = pairs.outer(across, across * where(y == 0, 0.0, 1 / y))
    return Operand(y, _real(tangent), total((_real(second), bent)))


@complex_rule(aten.angle)
def _angle(pairs: PairSet, op: Any, x: Operand) -> Operand:
    """The imaginary part of log x. At zero 0."""
    inverse = where(x.primal == 0, 0.0, 1 / x.primal)
    tangent, second = _turned(x.tangent, inverse), _turned(x.second, inverse) if pairs.rows else None
    bent = -pairs.outer(tangent, tangent) if pairs.rows and tangent is not None else None
    return Operand(op(x.primal), _imaginary(tangent), _imaginary(total((second, bent))))


def _sgn(x: Tensor) -> Tensor:
    """x / |x|, and zero at zero."""
    size = x.abs()
    zero = size == 0
    return where(zero, 0.0, x / where(zero, 1.0, size))


complex_composite(aten.sgn, _sgn)


def _logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """With torch's own value, for other sums of the same logarithms differ by multiples of 2 pi i."""
    sums = scan(x, dim, torch.logaddexp)
    return aten.logcumsumexp(x.detach(), dim) + (sums - sums.detach())


complex_composite(aten.logcumsumexp, _logcumsumexp)
complex_composite(
    aten.nan_to_num,
    lambda x, nan=None, posinf=None, neginf=None: torch.view_as_complex(
        torch.nan_to_num(torch.view_as_real(x.resolve_conj()), nan, posinf, neginf)
    ),
)

# -- other branches --------------------------------------------------------------------------------------------------


def _complex_elementwise(op: Any, first: Derivative, second: Derivative) -> None:
    """A function of one complex number with its first and second derivative."""

    @complex_rule(op)
    def rule(pairs: PairSet, op: Any, x: Operand) -> Operand:
        y = op(x.primal)
        d = first(x.primal, y)
        return chain(pairs, y, [x], [d], {(0, 0): lambda: second(x.primal, y, d)})


# the product of the two roots, and not the root of the product, whose branch is another one
_complex_elementwise(aten.acosh, lambda x, y: torch.rsqrt(x - 1) * torch.rsqrt(x + 1), lambda x, y, d: -x * d**3)


def _share(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), which torch's sigmoid of a complex number is not where exp(-x) is infinite."""
    right = x.real >= 0
    small = torch.exp(where(right, -x, x))
    return where(right, 1.0, small) / (1 + small)


@complex_rule(aten.logaddexp)
def _logaddexp(pairs: PairSet, op: Any, a: Any, b: Any) -> Operand:
    x, z = primals_of((a, b))
    p, q = _share(x - z), _share(z - x)
    return chain(pairs, op(x, z), [a, b], [p, q], {(0, 0): p * q, (0, 1): -p * q, (1, 1): p * q})
