"""Special functions against the differential equations and identities that define them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import jetplane as jp
from cases import F64, assert_close, vec

X = vec(-2.3, -0.6, 0.0, 0.4, 1.0, 3.7)


def jet(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The function and its first two derivatives, entry by entry."""
    found = jp.jet(function, x, torch.ones(1, *x.shape, dtype=F64))
    return found.primal, found.tangent[0], found.second[0]


def test_error_functions() -> None:
    density = 2 / math.sqrt(math.pi) * torch.exp(-X.square())
    for function, sign in ((torch.erf, 1), (torch.erfc, -1)):
        _, first, second = jet(function, X)
        assert_close(first, sign * density)
        assert_close(second, -2 * sign * X * density)
    _, first, second = jet(lambda x: torch.erfinv(torch.erf(x)), X[1:-1])  # the identity
    assert_close(first, torch.ones(4, dtype=F64))
    assert second.abs().max() < 1e-11


@pytest.mark.parametrize("order", [0, 1])
def test_bessel_functions_solve_their_equation(order: int) -> None:
    """x^2 y'' + x y' - (x^2 + n^2) y = 0."""
    y, first, second = jet(torch.special.i0 if order == 0 else torch.special.i1, X)
    residual = X.square() * second + X * first - (X.square() + order**2) * y
    assert residual.abs().max() < 1e-11 * float(y.abs().max() * X.square().max())


def test_bessel_functions_at_zero() -> None:
    """I_0 = 1 + x^2 / 4 + ... and I_1 = x / 2 + x^3 / 16 + ..."""
    zero = vec(0.0)
    for function, expected in ((torch.special.i0, (1.0, 0.0, 0.5)), (torch.special.i1, (0.0, 0.5, 0.0))):
        assert [float(part) for part in jet(function, zero)] == list(expected)


def test_the_gamma_function_and_its_relatives_obey_the_recurrence() -> None:
    """log gamma(x + 1) - log gamma(x) = log x, so the derivatives differ by 1 / x and -1 / x^2."""
    x = vec(0.3, 1.0, 2.5, 6.0)
    _, first, second = jet(lambda x: torch.lgamma(x + 1) - torch.lgamma(x), x)
    assert_close(first, 1 / x)
    assert_close(second, -1 / x.square(), 1e-9)  # torch's own trigamma is no more exact
    _, first, second = jet(lambda x: torch.polygamma(1, x + 1) - torch.polygamma(1, x), x)
    assert_close(first, 2 / x**3, 1e-9)
    assert_close(second, -6 / x**4, 1e-9)
