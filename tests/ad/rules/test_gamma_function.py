"""Incomplete gamma functions by both arguments, and samples, against mpmath and torch's backward passes."""

from __future__ import annotations

from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor
from torch.distributions import Beta, Dirichlet, Gamma, StudentT

import jetplane as jp
from cases import F64, assert_close, vec
from jetplane.ad.rules.gamma_function import by_both

POINTS = [(0.3, 0.01), (0.3, 2.0), (2.0, 0.5), (2.0, 9.0), (30.0, 25.0), (30.0, 60.0), (500.0, 520.0)]


def _lower(a: Any, x: Any) -> Any:
    return mpmath.gammainc(a, 0, x, regularized=True)


@pytest.fixture(autouse=True)
def digits() -> Any:
    """Many: mpmath differentiates by differences."""
    with mpmath.workdps(40):
        yield


@pytest.mark.parametrize("point", POINTS)
def test_all_derivatives_of_second_order(point: tuple[float, float]) -> None:
    orders = [(1, 0), (0, 1), (2, 0), (1, 1), (0, 2)]
    expected = vec(*(float(mpmath.diff(_lower, point, order)) for order in orders))
    assert_close(torch.cat(by_both(vec(point[0]), vec(point[1]))), expected, tolerance=1e-8)


def test_many_entries_are_summed_in_parts() -> None:
    a, x = torch.linspace(0.5, 40, 300, dtype=F64), torch.linspace(60, 0.5, 300, dtype=F64)
    found = torch.stack(by_both(a, x))
    assert_close(found[:, ::50], torch.stack(by_both(a[::50], x[::50])), tolerance=1e-12)
    assert torch.stack(by_both(a[:0], x[:0])).shape == (5, 0)


@pytest.mark.parametrize(("function", "sign"), [(torch.igamma, 1.0), (torch.igammac, -1.0)])
def test_the_functions_vary_by_both_arguments(function: Any, sign: float) -> None:
    found = jp.quadratic(lambda z: function(z[0], z[1]), vec(2.0, 3.0), torch.eye(2, dtype=F64))
    first = vec(*(float(mpmath.diff(_lower, (2, 3), n)) for n in ((1, 0), (0, 1))))
    second = vec(*(float(mpmath.diff(_lower, (2, 3), n)) for n in ((2, 0), (1, 1), (1, 1), (0, 2)))).reshape(2, 2)
    assert_close(found.slope, sign * first, tolerance=1e-8)
    assert_close(found.curvature, sign * second, tolerance=1e-8)


def test_a_sample_bends_as_the_quantile_does() -> None:
    a = vec(0.7, 2.5, 12.0)

    def draw(a: Tensor) -> Tensor:
        torch.manual_seed(4)
        return torch._standard_gamma(a)

    found = jp.quadratic(lambda a: draw(a).sum(), a, torch.eye(3, dtype=F64)).curvature
    for place, (start, x) in enumerate(zip(a.tolist(), draw(a).tolist(), strict=True)):
        level = _lower(start, x)

        def quantile(a: Any, level: Any = level, x: float = x) -> Any:
            return mpmath.findroot(lambda y: _lower(a, y) - level, x)

        assert_close(
            found[place, place], torch.tensor(float(mpmath.diff(quantile, start, 2)), dtype=F64), tolerance=1e-7
        )


SAMPLES = [
    ("gamma", lambda a: Gamma(a, a + 1).rsample().square().sum()),
    ("beta", lambda a: Beta(a, a + 1).rsample().square().sum()),
    ("dirichlet", lambda a: Dirichlet(a).rsample().square().sum()),
    ("student", lambda a: StudentT(a).rsample().square().sum()),
]


@pytest.mark.parametrize("sample", [row[1] for row in SAMPLES], ids=[row[0] for row in SAMPLES])
def test_slopes_are_those_of_backprop(sample: Any) -> None:
    def program(a: Tensor) -> Tensor:
        torch.manual_seed(3)
        return sample(a)

    a = vec(0.6, 1.4, 3.0)
    leaf = a.clone().requires_grad_()
    (expected,) = torch.autograd.grad(program(leaf), leaf)
    for k, v in enumerate(torch.eye(3, dtype=F64)):
        assert_close(jp.jvp(program, a, v)[1], expected[k])


def test_a_dirichlet_sample_has_no_second_derivative() -> None:
    with pytest.raises(jp.MissingRule, match=r"a Dirichlet sample has no second derivative by its concentration"):
        jp.quadratic(lambda a: Dirichlet(a).rsample().square().sum(), vec(1.0, 2.0), torch.eye(2, dtype=F64))


def _field(entry: int, x: list[Any], a: list[Any]) -> list[Any]:
    """How a Dirichlet sample varies with an entry of its concentration, as torch's backward pass has it."""
    rest = sum(a) - a[entry]
    level = mpmath.diff(lambda t: mpmath.betainc(t, rest, 0, x[entry], regularized=True), a[entry])
    density = mpmath.diff(lambda t: mpmath.betainc(a[entry], rest, 0, t, regularized=True), x[entry])
    return [-level / density / (1 - x[entry]) * ((n == entry) - one) for n, one in enumerate(x)]


def _twice(first: int, then: int, x: list[Any], a: list[Any]) -> float:
    """The second derivative of the first entry of a sample, by two entries of its concentration in this order."""
    h = mpmath.mpf(10) ** -8
    ends = []
    for step in (h, -h):
        moved = [one + step * slope for one, slope in zip(x, _field(then, x, a), strict=True)]
        ends.append(_field(first, moved, [one + step * (n == then) for n, one in enumerate(a)])[0])
    return float((ends[0] - ends[1]) / (2 * h))


@pytest.mark.parametrize("count", [2, 3])
def test_the_derivatives_of_a_dirichlet_sample_are_those_of_a_function_for_two_entries_alone(count: int) -> None:
    a = [mpmath.mpf(n) for n in ("0.7", "1.5", "2.2")][:count]
    x = [one / sum(a) for one in a]
    apart = abs(_twice(0, 1, x, a) - _twice(1, 0, x, a))
    assert apart < 1e-10 if count == 2 else apart > 1e-4
    start, sample = (vec(*map(float, one)) for one in (a, x))
    torchs = torch._dirichlet_grad(sample, start, start.sum().expand(count))  # a fit to some digits
    assert_close(torchs[0] * (1 - sample[0]), torch.tensor(float(_field(0, x, a)[0]), dtype=F64), tolerance=1e-2)


def test_the_derivative_of_a_sample_is_no_constant() -> None:
    def program(a: Tensor) -> Tensor:  # it has been taken for one
        return torch._standard_gamma_grad(a, torch.ones_like(a)).sum()

    with pytest.raises(jp.MissingRule, match=r"_standard_gamma_grad.default has no rule"):
        jp.gradient(program, vec(1.0, 2.0))
