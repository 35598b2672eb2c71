"""Bessel, incomplete gamma and zeta functions against mpmath, and special functions that have no rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor, special

import jetplane as jp
from cases import F64, check, randn, vec

AT = [0.3, 1.0, 2.7, 6.5]
BESSEL = [
    ("j0", special.bessel_j0, lambda x: mpmath.besselj(0, x), [0.0, *AT]),
    ("j1", special.bessel_j1, lambda x: mpmath.besselj(1, x), [0.0, *AT]),
    ("y0", special.bessel_y0, lambda x: mpmath.bessely(0, x), AT),
    ("y1", special.bessel_y1, lambda x: mpmath.bessely(1, x), AT),
    ("i0", special.modified_bessel_i0, lambda x: mpmath.besseli(0, x), [0.0, *AT]),
    ("i1", special.modified_bessel_i1, lambda x: mpmath.besseli(1, x), [0.0, *AT]),
    ("k0", special.modified_bessel_k0, lambda x: mpmath.besselk(0, x), AT),
    ("k1", special.modified_bessel_k1, lambda x: mpmath.besselk(1, x), AT),
    ("igamma", lambda x: torch.igamma(vec(1.7), x), lambda x: mpmath.gammainc(1.7, 0, x, regularized=True), AT),
    ("igammac", lambda x: torch.igammac(vec(1.7), x), lambda x: mpmath.gammainc(1.7, x, regularized=True), AT),
    ("zeta", lambda x: special.zeta(vec(2.5), x), lambda x: mpmath.zeta(2.5, x), AT),
]


@pytest.mark.parametrize(("function", "truth", "points"), [row[1:] for row in BESSEL], ids=[row[0] for row in BESSEL])
def test_against_mpmath(function: Callable[[Tensor], Tensor], truth: Any, points: list[float]) -> None:
    first, second = (vec(*(float(mpmath.diff(truth, x, n)) for x in points)) for n in (1, 2))
    check(lambda x: function(x).sum(), vec(*points), first, torch.diag(second), tolerance=1e-7)


def test_the_order_of_zeta_has_no_derivative() -> None:
    message = r"the rule of aten.special_zeta.default does not differentiate its argument 'self', which is perturbed"
    with pytest.raises(jp.MissingRule, match=message):
        jp.gradient(lambda a: special.zeta(a, vec(1.5, 2.0)).sum(), vec(2.0, 3.0))


@pytest.mark.parametrize("function", [special.spherical_bessel_j0, special.airy_ai])
def test_what_has_no_rule_says_so(function: Callable[[Tensor], Tensor]) -> None:
    # torch's table says of some that they are a primitive, which it says is the operation: a circle
    with pytest.raises(jp.MissingRule, match=r"aten\.\w+\.default has no rule; called at"):
        jp.gradient(lambda x: function(x).sum(), randn(3).abs().to(F64))
