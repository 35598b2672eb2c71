"""Elementwise functions at random points, and every function at its kinks, ties, zeros and saturation."""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jetplane as jp
from cases import ELEMENTWISE, ELEMENTWISE_OF_TWO, F64, check, check_against_oracle, randn, vec

INF = math.inf


def inside(domain: tuple[float, float], *shape: int) -> Tensor:
    low, high = domain
    return low + (high - low) * torch.rand(*shape, dtype=F64)


def names(rows: list) -> list[str]:
    return [row[0] for row in rows]


# -- random points ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "function", "domain"), ELEMENTWISE, ids=names(ELEMENTWISE))
def test_function_of_one(name: str, function: Callable[..., Tensor], domain: tuple[float, float]) -> None:
    weights = randn(5)
    check_against_oracle(lambda x: (function(x) * weights).sum(), inside(domain, 5))


@pytest.mark.parametrize(("name", "function", "first", "second"), ELEMENTWISE_OF_TWO, ids=names(ELEMENTWISE_OF_TWO))
def test_function_of_two(name: str, function: Callable[..., Tensor], first: tuple, second: tuple) -> None:
    weights = randn(5)
    check_against_oracle(lambda a, b: (function(a, b) * weights).sum(), inside(first, 5), inside(second, 5))


@pytest.mark.parametrize(("name", "function", "first", "second"), ELEMENTWISE_OF_TWO, ids=names(ELEMENTWISE_OF_TWO))
def test_function_of_two_with_only_one_perturbed(name: str, function, first: tuple, second: tuple) -> None:
    a, b, weights = inside(first, 5), inside(second, 5), randn(5)
    check_against_oracle(lambda x: (function(x, b) * weights).sum(), a)
    check_against_oracle(lambda x: (function(a, x) * weights).sum(), b)


@pytest.mark.parametrize("shapes", [((3, 1), (1, 4)), ((4,), (2, 3, 4)), ((), (3,)), ((1,), (0,)), ((2, 1, 3), (5, 1))])
def test_broadcasting(shapes: tuple) -> None:
    check_against_oracle(
        lambda a, b: (torch.atan2(a, b) * (a * b + a / (b + 5))).sum(),
        *(torch.rand(s, dtype=F64) + 0.1 for s in shapes),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_python_numbers_never_upcast(dtype: torch.dtype) -> None:
    x = torch.linspace(0.5, 1.5, 4).to(dtype)
    jet = jp.jet(lambda x: 2.0 * x**3 / 7 + 1.5 - x.clamp(min=0.1) * 3, x, torch.ones(2, 4, dtype=dtype))
    assert jet.primal.dtype == jet.tangent.dtype == jet.second.dtype == dtype


# -- kinks and ties: the first derivative is torch's backward's, exactly ------------------------------------------

_TIED = vec(1.0, 3.0, 3.0, -2.0, 3.0, -2.0)

KINKS: list[tuple[str, Callable[[Tensor], Tensor], Tensor]] = [
    ("relu", F.relu, vec(-1, 0, 1)),
    ("relu-minus-zero", F.relu, vec(-0.0, 0.0)),
    ("relu6", F.relu6, vec(0, 6)),
    ("leaky_relu", F.leaky_relu, vec(-1, 0, 1)),
    ("elu", F.elu, vec(-1, 0, 1)),
    ("selu", F.selu, vec(0)),
    ("celu", F.celu, vec(0)),
    ("prelu", lambda x: F.prelu(x, vec(0.3)), vec(-1, 0, 1)),
    ("abs", torch.abs, vec(-1, 0, 1)),
    ("sign", torch.sign, vec(-1, 0, 1)),
    ("clamp", lambda x: x.clamp(-1, 1), vec(-2, -1, 0, 1, 2)),
    ("clamp-min", lambda x: x.clamp_min(0), vec(-1, 0, 1)),
    ("clamp-max", lambda x: x.clamp_max(0), vec(-1, 0, 1)),
    ("clamp-tensor", lambda x: x.clamp(vec(-1, -1, 1), vec(0, 1, 1)), vec(-1, 1, 1)),
    ("hardtanh", F.hardtanh, vec(-1, 0, 1)),
    ("hardsigmoid", F.hardsigmoid, vec(-3, 3)),
    ("hardswish", F.hardswish, vec(-3, 0, 3)),
    ("hardshrink", F.hardshrink, vec(-0.5, 0, 0.5)),
    ("softshrink", F.softshrink, vec(-0.5, 0, 0.5)),
    ("threshold", lambda x: F.threshold(x, 0.5, 0.1), vec(0.5, 0.6)),
    ("softsign", F.softsign, vec(0)),
    ("softplus-threshold", lambda x: F.softplus(x, threshold=1.0), vec(0.9, 1.0, 1.1)),
    ("l1", lambda x: F.l1_loss(x, vec(0, 1, 2)), vec(0, 1, 3)),
    ("smooth-l1", lambda x: F.smooth_l1_loss(x, vec(0, 0, 0)), vec(-1, 0, 1)),
    ("huber", lambda x: F.huber_loss(x, vec(0, 0, 0)), vec(-1, 0, 1)),
    ("max", lambda x: x.max(), _TIED),
    ("min", lambda x: x.min(), _TIED),
    ("max-dim", lambda x: x.view(2, 3).max(1).values, _TIED),
    ("min-dim", lambda x: x.view(2, 3).min(0).values, _TIED),
    ("amax", lambda x: x.amax(), _TIED),
    ("amin", lambda x: x.view(2, 3).amin(1), _TIED),
    ("aminmax", lambda x: torch.stack(torch.aminmax(x)), _TIED),
    ("maximum", lambda x: torch.maximum(x, vec(1, 0, 3, -2, 4, -3)), _TIED),
    ("minimum", lambda x: torch.minimum(vec(1, 0, 3, -2, 4, -3), x), _TIED),
    ("fmax", lambda x: torch.fmax(x, vec(1, 0, 3, -2, 4, -3)), _TIED),
    ("fmin", lambda x: torch.fmin(x, vec(1, 0, 3, -2, 4, -3)), _TIED),
    ("maximum-with-itself", lambda x: torch.maximum(x, x), _TIED),
    ("sort", lambda x: x.sort(stable=True).values, _TIED),
    ("topk", lambda x: x.topk(2).values, _TIED),
    ("kthvalue", lambda x: x.kthvalue(3).values, _TIED),
    ("median", lambda x: x.median(), _TIED),
    ("median-dim", lambda x: x.view(2, 3).median(1).values, _TIED),
    ("mode", lambda x: x.mode().values, _TIED),
    ("quantile", lambda x: x.quantile(0.4), _TIED),
    ("cummax", lambda x: x.cummax(0).values, _TIED),
    ("cummin", lambda x: x.cummin(0).values, _TIED),
    ("max-pool", lambda x: F.max_pool1d(x.view(1, 1, 6), 2), _TIED),
    ("adaptive-max-pool", lambda x: F.adaptive_max_pool1d(x.view(1, 1, 6), 2), _TIED),
    ("scatter-amax", lambda x: vec(0, 3).scatter_reduce(0, torch.tensor([0, 0, 1, 1, 1, 0]), x, "amax"), _TIED),
    ("norm-inf", lambda x: torch.linalg.vector_norm(x, INF), _TIED),
    ("hinge", lambda x: F.hinge_embedding_loss(x, vec(-1, -1, 1)), vec(1, 2, 0)),
    ("where", lambda x: torch.where(x > 0, x * x, -x), vec(-1, 0, 1)),
    ("frac", torch.frac, vec(-1, 0, 2)),
    ("copysign", lambda x: torch.copysign(x, vec(1, -1, 1)), vec(0, 0, -1)),
    ("nan_to_num", lambda x: torch.nan_to_num(x, nan=1.0), vec(math.nan, INF, 2)),
    ("norm-1-at-zero", lambda x: torch.linalg.vector_norm(x, 1), vec(0, 1, -1)),
    ("norm-2-at-zero", lambda x: x.norm(), vec(0, 0, 0)),
    ("norm-3-at-zero", lambda x: x.norm(3), vec(0, 0, 0)),
    ("norm-inf-at-zero", lambda x: x.norm(INF), vec(0, 0, 0)),
    ("norm-rows", lambda x: x.view(2, 2).norm(dim=1), vec(0, 0, 3, 4)),
    ("cdist-at-zero", lambda x: torch.cdist(x.view(1, 3), vec(1, 2, 3).view(1, 3)), vec(1, 2, 3)),
    ("hypot-at-zero", lambda x: torch.hypot(x, vec(1)), vec(0)),
    ("std-of-constant", lambda x: x.std(), vec(2, 2, 2)),
    ("sqrt-of-var-of-constant", lambda x: x.var(), vec(2, 2, 2)),
    ("cosine-at-zero", lambda x: F.cosine_similarity(x, vec(1, 2, 3), dim=0), vec(0, 0, 0)),
    ("normalize-at-zero", lambda x: F.normalize(x, dim=0), vec(0, 0, 0)),
]


@pytest.mark.parametrize(("name", "function", "x"), KINKS, ids=names(KINKS))
def test_kink_has_the_slope_of_backward_and_finite_curvature(name: str, function, x: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    try:
        jacobian = torch.autograd.functional.jacobian(function, leaf)
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        pytest.skip(f"torch {torch.__version__} has no backward for {name}")
    torch.testing.assert_close(jp.gradient(function, x), jacobian, rtol=1e-14, atol=1e-14)
    assert jp.hessian(function, x).isfinite().all()


# -- zeros: closed forms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("power", "slope", "curvature"),
    [(0, 0.0, 0.0), (1, 1.0, 0.0), (2, 0.0, 2.0), (3, 0.0, 0.0), (2.0, 0.0, 2.0), (1.0, 1.0, 0.0)],
)
def test_power_at_zero(power: float, slope: float, curvature: float) -> None:
    zero = torch.zeros((), dtype=F64)
    check(lambda x: x**power, zero, zero + slope, zero + curvature)
    check(lambda x: x ** torch.tensor(power), zero, zero + slope, zero + curvature)
    check(lambda x: torch.float_power(x, power), zero, zero + slope, zero + curvature)


@pytest.mark.parametrize(("exponent", "curvature"), [(2.0, 2.0), (3.0, 0.0)])
def test_power_at_zero_with_a_varying_exponent(exponent: float, curvature: float) -> None:
    # x**y: f_x = y x**(y-1), f_y = x**y log x -> 0, f_xx = y (y-1) x**(y-2), f_xy and f_yy -> 0
    check(lambda z: z[0] ** z[1], vec(0, exponent), vec(0, 0), torch.diag(vec(curvature, 0)))


def test_zero_to_a_varying_power() -> None:
    check(lambda y: torch.pow(0.0, y).sum(), vec(1, 2), vec(0, 0), torch.zeros(2, 2, dtype=F64))
    check(lambda x: torch.xlogy(x, vec(0.5, 2)).sum(), vec(0, 0), vec(0.5, 2).log(), torch.zeros(2, 2, dtype=F64))
    check(lambda y: torch.xlogy(vec(0, 0), y).sum(), vec(0.5, 2), vec(0, 0), torch.zeros(2, 2, dtype=F64))


# -- saturation and removable singularities: high precision --------------------------------------------------------

_mp = mpmath


def _sinc(x):
    return _mp.mpf(1) if x == 0 else _mp.sin(_mp.pi * x) / (_mp.pi * x)


def _softplus(x):
    return _mp.log1p(_mp.exp(x)) if x < 0 else x + _mp.log1p(_mp.exp(-x))


PRECISE: list[tuple[str, Callable[[Tensor], Tensor], Callable, tuple[float, ...]]] = [
    ("sigmoid", torch.sigmoid, lambda x: 1 / (1 + _mp.exp(-x)), (-200, -40, 40, 200)),
    ("softplus", F.softplus, _softplus, (-200, -40, 19, 200)),
    ("logsigmoid", F.logsigmoid, lambda x: -_softplus(-x), (-200, -40, 40, 200)),
    ("silu", F.silu, lambda x: x / (1 + _mp.exp(-x)), (-200, -40, 40, 200)),
    ("mish", F.mish, lambda x: x * _mp.tanh(_softplus(x)), (-200, -40, 40, 200)),
    ("tanh", torch.tanh, _mp.tanh, (-200, -20, 1e-8, 20, 200)),
    ("tanhshrink", F.tanhshrink, lambda x: x - _mp.tanh(x), (-200, 1e-4, 200)),
    ("gelu", F.gelu, lambda x: x * _mp.ncdf(x), (-200, -40, 40, 200)),
    (
        "gelu-tanh",
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: x * (1 + _mp.tanh(_mp.sqrt(2 / _mp.pi) * (x + _mp.mpf("0.044715") * x**3))) / 2,
        (-200, 200),
    ),
    ("erf", torch.erf, _mp.erf, (-40, 0, 40)),
    ("ndtr", torch.special.ndtr, _mp.ncdf, (-40, 0, 40)),
    ("log_ndtr", torch.special.log_ndtr, lambda x: _mp.log(_mp.erfc(-x / _mp.sqrt(2)) / 2), (-200, -30, -5, 0, 5, 40)),
    ("erfcx", torch.special.erfcx, lambda x: _mp.exp(x * x) * _mp.erfc(x), (0, 2, 5)),
    ("sinc", torch.sinc, _sinc, (0, 0.5, 1)),
    ("sinc-near-zero", torch.sinc, _sinc, (1e-3, 1e-6)),
    ("i0", torch.i0, lambda x: _mp.besseli(0, x), (0, 1e-6, 5)),
    ("i1", torch.special.i1, lambda x: _mp.besseli(1, x), (0, 1e-6, 5)),
    ("i0e", torch.special.i0e, lambda x: _mp.besseli(0, x) * _mp.exp(-x), (1e-6, 5, 200)),
    ("i1e", torch.special.i1e, lambda x: _mp.besseli(1, x) * _mp.exp(-x), (1e-6, 5, 200)),
    ("logaddexp", lambda x: torch.logaddexp(x, 0 * x), _softplus, (-1e4, -200, 0, 200, 1e4)),
    ("logaddexp-constant", lambda x: torch.logaddexp(x, torch.zeros((), dtype=F64)), _softplus, (-1e4, 0, 1e4)),
    (
        "bce-logits",
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x), reduction="none"),
        lambda x: _softplus(-x),
        (-200, 200),
    ),
    ("log1p", torch.log1p, _mp.log1p, (1e-20, 1e20)),
    ("expm1", torch.expm1, _mp.expm1, (-200, 1e-20)),
    ("atan", torch.atan, _mp.atan, (-1e20, 0, 1e20)),
    ("asinh", torch.asinh, _mp.asinh, (-1e20, 0, 1e20)),
    ("acosh", torch.acosh, _mp.acosh, (1.0001, 1e20)),
    ("hypot", lambda x: torch.hypot(x, torch.ones_like(x)), lambda x: _mp.sqrt(x * x + 1), (0, 1e3)),
    ("atan2-behind", lambda x: torch.atan2(x, -torch.ones_like(x)), lambda x: _mp.atan2(x, -1), (1e-9, 1)),
    ("digamma", torch.digamma, lambda x: _mp.digamma(x), (1e-3, 100)),
    ("lgamma", torch.lgamma, lambda x: _mp.loggamma(x), (1e-3, 100)),
    ("erfinv", torch.erfinv, _mp.erfinv, (-0.999999, 0)),
    ("logit", torch.logit, lambda x: _mp.log(x / (1 - x)), (1e-9, 0.5)),
]


@pytest.mark.parametrize(("name", "function", "exact", "points"), PRECISE, ids=names(PRECISE))
def test_against_high_precision(name: str, function, exact, points: tuple[float, ...]) -> None:
    for point in points:
        x = torch.tensor(point, dtype=F64)
        jet = jp.jet(function, x, torch.ones(1, dtype=F64))
        with mpmath.workdps(250):
            derivatives = [float(mpmath.re(mpmath.diff(exact, mpmath.mpf(point), n))) for n in (0, 1, 2)]
        for actual, expected in zip((jet.primal, jet.tangent[0], jet.second[0]), derivatives, strict=True):
            # 1e-15: 1 - y of a saturated y is right to that, absolutely
            torch.testing.assert_close(
                float(actual), expected, rtol=1e-9, atol=1e-15, msg=lambda m, at=point: f"{name} at {at}: {m}"
            )


def test_heaviside_has_the_derivative_of_its_values_at_zero() -> None:
    at = vec(-1.0, 0.0, 2.0)
    weights = vec(3.0, 5.0, 7.0)
    check(
        lambda v: (torch.heaviside(at, v * v) * weights).sum(),
        vec(2.0, 3.0, 4.0),
        vec(0.0, 30.0, 0.0),
        torch.diag(vec(0.0, 10.0, 0.0)),
    )
    check(lambda x: torch.heaviside(x, weights).sum(), at, torch.zeros(3).double(), torch.zeros(3, 3).double())
