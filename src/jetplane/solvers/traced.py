"""Solvers as programs that ask the host nothing: what a compiled step, and a CUDA graph, is made of.

Every branch of :func:`jetplane.solvers.base.solve` is a ``where`` here, and the status a number on the device. The
numbers are those of the solver itself, up to rounding; tests hold the two together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..ad.algebra.jet import Quadratic
from .base import Status, filled, plainly, zero_columns

CODES = tuple(Status)  # a status on the device is its place here
OK, NONFINITE, SINGULAR, FLAT, REJECTED = range(len(CODES))


class TracedStep(NamedTuple):
    """A step in the plane whose status is not known to the host yet."""

    coefficients: Tensor  # (K,), zero unless the status is OK
    code: Tensor  # () int64: which of CODES
    predicted: Tensor  # ()


Method = Callable[[Quadratic], tuple[Tensor, Tensor]]  # coefficients (K,) and whether they could be found, a bool ()


def solve(model: Quadratic, method: Method, failure: Status, *, descends: bool) -> TracedStep:
    """The step that ``method`` finds in float64, in the model's dtype, with ``failure`` where it finds none."""
    like = model.slope.detach()
    plain = plainly(model, like.device)
    finite = _finite(model.loss) & _finite(plain.slope) & _finite(plain.curvature)
    moving = plain.slope.ne(0).any()
    zero = zero_columns(plain)
    found, solved = method(filled(plain, zero))
    found = torch.where(zero, 0.0, found)
    coefficients = found.to(like.dtype)
    if descends:
        signs = coefficients.sign() * like.sign()  # products may vanish where their signs do not
        falls = ((coefficients * like).sum() < 0) | (signs.le(0).all() & signs.lt(0).any())
        uphill = _finite(coefficients) & ~falls
        found = torch.where(uphill, _cauchy(plain), found)
        coefficients = found.to(like.dtype)
    predicted = plain.decrease(found, fused=True).to(like.dtype)
    result = _finite(coefficients) & _finite(predicted)
    code = torch.where(result, torch.where(coefficients.ne(0).any(), OK, FLAT), NONFINITE)
    code = torch.where(solved, code, CODES.index(failure))
    code = torch.where(moving, code, FLAT)
    code = torch.where(finite, code, NONFINITE)
    taken = code == OK
    return TracedStep(torch.where(taken, coefficients, 0.0), code, torch.where(taken, predicted, 0.0))


def followed(state: Tensor, predicted: Tensor, actual: Tensor, *, up: float, down: float, smallest: float) -> Tensor:
    """:func:`jetplane.solvers.base.followed` of :func:`jetplane.solvers.base.agreement`, as tensors ().

    Example:
        >>> one = torch.ones((), dtype=torch.float64)
        >>> [float(followed(one, one, a * one, up=4, down=2, smallest=1e-12)) for a in (0.1, 0.5, 0.9)]
        [4.0, 1.0, 0.5]
    """
    predicted, actual = predicted.to(torch.float64), actual.to(torch.float64)
    known = torch.isfinite(predicted) & torch.isfinite(actual) & (predicted > 0)
    ratio = torch.where(known, actual / torch.where(known, predicted, 1.0), -math.inf)
    lower = torch.maximum(state / down, state.clamp_max(smallest))
    return torch.where(ratio < 0.25, (up * state).clamp_max(1e300), torch.where(ratio > 0.75, lower, state))


def inverse(matrix: Tensor) -> Tensor:
    """The inverses of small matrices (..., K, K) by elimination with pivots, not finite where there is none.

    torch's own would call a library that checks its result on the host.

    Example:
        >>> matrix = torch.tensor([[0.0, 2.0], [4.0, 0.0]])
        >>> torch.testing.assert_close(inverse(matrix) @ matrix, torch.eye(2))
    """
    k = matrix.shape[-1]
    if k <= 3:
        return _by_cofactors(matrix)
    identity = torch.eye(k, dtype=matrix.dtype, device=matrix.device).expand(matrix.shape)
    rows = torch.cat([matrix, identity], dim=-1)  # (..., K, 2K)
    number = torch.arange(k, device=matrix.device)
    free = torch.ones(matrix.shape[:-1], dtype=torch.bool, device=matrix.device)  # rows that were no pivot yet
    order = torch.zeros(matrix.shape[:-1], dtype=torch.int64, device=matrix.device)
    for column in range(k):
        size = torch.where(free, rows[..., column].abs(), -1.0)
        chosen = size.argmax(-1, keepdim=True)  # (..., 1)
        hot = number == chosen  # (..., K)
        pivot = torch.where(hot.unsqueeze(-1), rows, 0.0).sum(-2)  # a sum of one term
        pivot = pivot / pivot[..., column : column + 1]
        factors = torch.where(hot, 0.0, rows[..., column])
        rows = torch.where(hot.unsqueeze(-1), pivot.unsqueeze(-2), rows - factors.unsqueeze(-1) * pivot.unsqueeze(-2))
        free = free & ~hot
        order = torch.where(hot, column, order)
    # row r of the result is the one that was the pivot of column r
    return rows[..., k:].gather(-2, order.argsort(-1).unsqueeze(-1).expand(*order.shape, k))


def _by_cofactors(matrix: Tensor) -> Tensor:
    """The same for K up to 3, in sums and products alone: a compiler makes one kernel of them.

    The matrix is scaled to entries of order one before, so that no product overflows.
    """
    k = matrix.shape[-1]
    if k == 1:
        return 1 / matrix
    size = matrix.abs().amax((-2, -1), keepdim=True)
    size = torch.where(size > 0, size, 1.0)
    scaled = matrix / size
    # nothing is stacked: to a compiler a stack is memory, and an index arithmetic
    if k == 2:
        number = torch.arange(2, device=matrix.device)
        adjugate = torch.where(number == number[:, None], scaled.flip((-2, -1)), -scaled)
    else:
        batch = matrix.shape[:-2]
        twice = scaled.mT[..., None, :, None, :].expand(*batch, 2, 3, 2, 3).reshape(*batch, 6, 6)

        def shifted(i: int, j: int) -> Tensor:
            return twice[..., i : i + 3, j : j + 3]

        adjugate = shifted(1, 1) * shifted(2, 2) - shifted(1, 2) * shifted(2, 1)
    determinant = sum(scaled[..., 0, j] * adjugate[..., j, 0] for j in range(1, k))
    determinant = determinant + scaled[..., 0, 0] * adjugate[..., 0, 0]
    return adjugate / determinant[..., None, None] / size


def _finite(tensor: Tensor) -> Tensor:
    return torch.isfinite(tensor.detach()).all()


def _cauchy(plain: Quadratic) -> Tensor:
    unit = plain.slope / plain.slope.abs().max()
    unit = unit / unit.norm()
    curvature = (unit @ plain.curvature @ unit).abs()
    slope = (plain.slope * unit).sum()
    return -unit * torch.where(curvature > 0, slope / curvature, slope)
