"""Tables from other projects, as data: hyper-dual constants, perturbation confusion, Laplacians of tanh networks.

The files in tests/data name their sources. Numbers and formulas are facts; no code was copied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jetplane as jp
from jetplane.testing.oracle import double_backward

DATA = Path(__file__).parents[1] / "data"


def load(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text())


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def close(actual: Tensor, expected: Any, digits: int = 12) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=10.0**-digits, atol=1e-12)


# -- num-dual -----------------------------------------------------------------------------------------------------


def bessel(order: int) -> Callable[[Tensor], Tensor]:
    """J_n by its integral: the mean of cos(n a - x sin a) over a full turn, which 64 points give to rounding."""
    angles = torch.arange(64, dtype=torch.float64) * (2 * math.pi / 64)
    return lambda x: (order * angles - x * angles.sin()).cos().mean()


NUM_DUAL: dict[str, Callable[..., Tensor]] = {
    "recip": torch.reciprocal,
    "exp": torch.exp,
    "exp_m1": torch.expm1,
    "exp2": torch.exp2,
    "ln": torch.log,
    "log": lambda x, base: torch.log(x) / math.log(base),
    "ln_1p": torch.log1p,
    "log2": torch.log2,
    "log10": torch.log10,
    "sqrt": torch.sqrt,
    "cbrt": lambda x: x.pow(1 / 3),
    "powf": lambda x, exponent: torch.pow(x, exponent),
    "powi": lambda x, exponent: torch.pow(x, int(exponent)),
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "asin": torch.asin,
    "acos": torch.acos,
    "atan": torch.atan,
    "atan2": lambda y, x: torch.atan2(y, scalar(x)),
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "tanh": torch.tanh,
    "asinh": torch.asinh,
    "acosh": torch.acosh,
    "atanh": torch.atanh,
    "sph_j0": lambda x: x.sin() / x,
    "sph_j1": lambda x: (x.sin() - x * x.cos()) / x**2,
    "sph_j2": lambda x: ((3 - x**2) * x.sin() - 3 * x * x.cos()) / x**3,
    "bessel_j0": bessel(0),
    "bessel_j1": bessel(1),
    "bessel_j2": bessel(2),
}

num_dual = pytest.mark.parametrize("case", load("num_dual")["cases"], ids=lambda case: case["case"])


@num_dual
def test_num_dual_constants(case: dict[str, Any]) -> None:
    x, one = scalar(case["x"]), scalar(1.0)
    number = jp.hyperdual(lambda x: NUM_DUAL[case["function"]](x, *case["arguments"]), x, one, one)
    close(number.real, case["value"])
    close(number.eps1, case["first"])
    close(number.eps2, case["first"])
    close(number.eps12, case["second"])


@num_dual
def test_num_dual_third_derivatives(case: dict[str, Any]) -> None:
    x, one = scalar(case["x"]), scalar(1.0)

    def second(x: Tensor) -> Tensor:
        return jp.hyperdual(lambda x: NUM_DUAL[case["function"]](x, *case["arguments"]), x, one, one).eps12

    value, third = jp.jvp(second, (x,), (one,))
    close(value, case["second"])
    close(third, case["third"])


@num_dual
def test_num_dual_with_a_bent_path(case: dict[str, Any]) -> None:
    # x + 2 e1 + 3 e2 + 5 e1 e2: eps12 = 5 f' + 6 f''
    def function(x: Tensor) -> Tensor:
        return NUM_DUAL[case["function"]](x, *case["arguments"])

    number = jp.hyperdual(function, scalar(case["x"]), scalar(2.0), scalar(3.0), scalar(5.0))
    close(number.eps1, 2 * case["first"])
    close(number.eps2, 3 * case["first"])
    close(number.eps12, 5 * case["first"] + 6 * case["second"], digits=11)


# -- HyperDualNumbers.jl ------------------------------------------------------------------------------------------


def black_scholes(spot: Tensor) -> Tensor:
    """The price of a European call, strike 80, two years, rate 0.01, volatility 0.2."""
    strike, years, rate, volatility = 80.0, 2.0, 0.01, 0.2
    spread = volatility * math.sqrt(years)
    upper = ((spot / strike).log() + (rate + volatility**2 / 2) * years) / spread

    def normal(z: Tensor) -> Tensor:
        return (1 + torch.erf(z / math.sqrt(2))) / 2

    return spot * normal(upper) - strike * math.exp(-rate * years) * normal(upper - spread)


def newton_square_root(x: Tensor) -> Tensor:
    """Newton's iteration, stopped by the value: control flow of Python."""
    root = x
    while abs(root * root - x) > 1e-13:
        root = (root + x / root) / 2
    return root


JULIA: dict[str, Callable[[Tensor], Tensor]] = {
    "exp(x)/sqrt(sin(x)^3+cos(x)^3)": lambda x: x.exp() / (x.sin() ** 3 + x.cos() ** 3).sqrt(),
    "1-(96/25)x^2+(112/25)x^4": lambda x: 1 - 96 / 25 * x**2 + 112 / 25 * x**4,
    "sin(x)^cos(x)": lambda x: x.sin() ** x.cos(),
    "(x^3+exp(x))/(log(x^2+1)+1)": lambda x: (x**3 + x.exp()) / ((x**2 + 1).log() + 1),
    "(tan(x)/(x^2+cos(x)+1))^(x^3+1)": lambda x: (x.tan() / (x**2 + x.cos() + 1)) ** (x**3 + 1),
    "cos(x)^-1.2": lambda x: x.cos() ** -1.2,
    "-x^3+4x^2+x": lambda x: -(x**3) + 4 * x**2 + x,
    "x^2-x": lambda x: x**2 - x,
    "(-x^3+4x^2+x)^(x^2-x)": lambda x: (-(x**3) + 4 * x**2 + x) ** (x**2 - x),
    "-4x^2+18": lambda x: -4 * x**2 + 18,
    "x^3-7": lambda x: x**3 - 7,
    "(-4x^2+18)^(x^3-7)": lambda x: (-4 * x**2 + 18) ** (x**3 - 7),
    "exp10(x)": lambda x: 10**x,
    "sin(x)+exp(x)": lambda x: x.sin() + x.exp(),
    "abs(-x^2)": lambda x: (-(x**2)).abs(),
    "1/x": lambda x: 1 / x,
    "e^x": lambda x: math.e**x,
    "black-scholes": black_scholes,
    "newton-square-root": newton_square_root,
}

ARITHMETIC: dict[str, Callable[[Tensor], Tensor]] = {
    "1/(1/a)": lambda a: 1 / (1 / a),
    "a/a": lambda a: a / a,
    "-a": lambda a: -a,
    "1+a": lambda a: 1 + a,
    "2+a": lambda a: 2 + a,
    "a-5": lambda a: a - 5,
    "1-a": lambda a: 1 - a,
    "0*a": lambda a: 0 * a,
    "1*a": lambda a: 1 * a,
    "abs(a)": torch.abs,
    "a^3": lambda a: a**3,
    "(a^3)^(1/3)": lambda a: (a**3) ** (1 / 3),
    "a*a": lambda a: a * a,
    "1/a": lambda a: 1 / a,
    "asin(sin(a))": lambda a: a.sin().asin(),
    "atan(tan(a))": lambda a: a.tan().atan(),
}


@pytest.mark.parametrize(
    "case", load("hyperdualnumbers_jl")["cases"], ids=lambda case: f"{case['function']}-at-{case['x']}"
)
def test_hyperdualnumbers_jl_functions(case: dict[str, Any]) -> None:
    one = scalar(1.0)
    number = jp.hyperdual(JULIA[case["function"]], scalar(case["x"]), one, one)
    close(number.real, case["value"], case["digits"])
    close(number.eps1, case["first"], case["digits"])
    close(number.eps2, case["first"], case["digits"])
    close(number.eps12, case["second"], case["digits"])


@pytest.mark.parametrize("case", load("hyperdualnumbers_jl")["arithmetic"], ids=lambda case: case["operation"])
def test_hyperdualnumbers_jl_arithmetic(case: dict[str, Any]) -> None:
    number = jp.hyperdual(ARITHMETIC[case["operation"]], *map(scalar, case["a"]))
    close(torch.stack(tuple(number)), case["result"])


# -- perturbation confusion ---------------------------------------------------------------------------------------


def D(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The derivative of a function of one number."""
    return jp.jvp(function, (x,), (torch.ones_like(x),))[1]


def reverse_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient of a scalar function by reverse mode."""
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, create_graph=True)[0]


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def lagrangian(position: Tensor, velocity: Tensor) -> Tensor:
    """m v.v / 2 - m g q_2 with m = 1."""
    return velocity @ velocity / 2 - 9.8 * position[1]


def legendre(function: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    """w.v - F(v) where the gradient of the quadratic F at v is w."""
    zero = torch.zeros_like(w)
    v = torch.linalg.solve(jp.hessian(function, zero), w - jp.gradient(function, zero))
    return w @ v - function(v)


MATRIX = torch.linspace(-1, 1, 80, dtype=torch.float64).reshape(10, 8)

CONFUSION: dict[str, Callable[[], Tensor]] = {
    "issue-83-derivative": lambda: D(lambda x: x * D(lambda y: x + y, scalar(1.0)), scalar(1.0)),
    "issue-83-gradient": lambda: jp.gradient(
        lambda v: v.sum() * D(lambda y: y * torch.linalg.vector_norm(v), scalar(1.0)), vector(1.0)
    ),
    "jacobian-of-gradient": lambda: jp.gradient(
        lambda x: jp.gradient(lambda y: y @ (MATRIX @ x), torch.ones(10, dtype=torch.float64)),
        torch.ones(8, dtype=torch.float64),
    ),
    "issue-238-mixed": lambda: jp.gradient(
        lambda a: jp.gradient(lambda b: lagrangian(a, b), vector(3.0, 4.0)), vector(1.0, 2.0)
    ),
    "issue-238-legendre": lambda: jp.gradient(
        lambda a: legendre(lambda b: lagrangian(a, b), vector(5.0, 6.0)), vector(1.0, 2.0)
    ),
    "issue-267-closure": lambda: jp.hessian(lambda x: x[0], vector(1.0)),
    "outer-variable-only": lambda: D(lambda x: D(lambda y: x, x), scalar(1.0)),
}


@pytest.mark.parametrize("case", load("confusion")["cases"], ids=lambda case: case["case"])
def test_perturbation_confusion(case: dict[str, Any]) -> None:
    expected = MATRIX if case["expected"] == "A" else case["expected"]
    close(CONFUSION[case["case"]](), expected)


def test_confusion_with_reverse_mode_inside() -> None:
    # the jacobian of a gradient again, the inner one by torch.autograd
    jacobian = jp.gradient(
        lambda x: reverse_gradient(lambda y: y @ (MATRIX @ x), torch.ones(10, dtype=torch.float64)),
        torch.ones(8, dtype=torch.float64),
    )
    close(jacobian, MATRIX)


# -- Laplacians of torch-jet's networks ---------------------------------------------------------------------------


def network(case: dict[str, Any]) -> nn.Sequential:
    """Linear layers of the scaled widths with tanh between them, and at the end where the case says so."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    width = case["scaled_dim"]
    for out, bias in zip(case["scaled"], case["bias"], strict=True):
        layers += [nn.Linear(width, out, bias=bias, dtype=torch.float64), nn.Tanh()]
        width = out
    return nn.Sequential(*(layers if case["last"] == "tanh" else layers[:-1])).requires_grad_(False)


torch_jet = pytest.mark.parametrize("case", load("torch_jet")["cases"], ids=lambda case: case["case"])


@torch_jet
def test_torch_jet_laplacian_of_one_point(case: dict[str, Any]) -> None:
    model, dim = network(case), case["scaled_dim"]
    x = torch.linspace(-1, 1, dim, dtype=torch.float64)
    basis = torch.eye(dim, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    expected = double_backward(lambda: model(leaf).sum(), [leaf], [basis]).curvature
    close(jp.laplacian(model, x), expected.trace()[None])
    close(jp.hessian(model, x)[0], expected)
    close(jp.jet(model, x, basis, "diagonal").second.sum(0), expected.trace()[None])


@torch_jet
def test_torch_jet_laplacian_of_a_batch(case: dict[str, Any]) -> None:
    model, dim, batch = network(case), case["scaled_dim"], case["batch"]
    x = torch.linspace(-1, 1, batch * dim, dtype=torch.float64).reshape(batch, dim).sin()
    laplacians = jp.laplacian(model, x, batch_ndim=1)
    assert laplacians.shape == (batch, 1)
    for row, value in zip(x, laplacians, strict=True):
        close(value, jp.hessian(model, row)[0].trace()[None])
        leaf = row.clone().requires_grad_()
        basis = torch.eye(dim, dtype=torch.float64)
        close(value, double_backward(lambda leaf=leaf: model(leaf).sum(), [leaf], [basis]).curvature.trace()[None])


@torch_jet
def test_torch_jet_trace_in_a_rotated_basis(case: dict[str, Any]) -> None:
    # trace(V H V^T) is the Laplacian for every orthogonal V
    model, dim = network(case), case["scaled_dim"]
    x = torch.linspace(-1, 1, dim, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.arange(dim * dim, dtype=torch.float64).reshape(dim, dim).cos()).Q
    expected = jp.laplacian(model, x)
    close(jp.laplacian(model, x, directions=rotation), expected, digits=11)
    close(jp.quadratic(model, x, rotation).curvature.trace()[None], expected, digits=11)


@torch_jet
def test_torch_jet_laplacian_backpropagates(case: dict[str, Any]) -> None:
    # what a physics-informed network needs: the Laplacian's gradient with respect to the weights
    model = network(case).requires_grad_()
    x = torch.linspace(-1, 1, case["scaled_dim"], dtype=torch.float64)
    weight = model[0].weight
    (actual,) = torch.autograd.grad(jp.laplacian(model, x).sum(), weight)

    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
    diagonal = [torch.autograd.grad(g, leaf, create_graph=True)[0][i] for i, g in enumerate(gradient)]
    (expected,) = torch.autograd.grad(torch.stack(diagonal).sum(), weight)
    close(actual, expected, digits=10)


@pytest.mark.slow
@torch_jet
def test_torch_jet_laplacian_at_the_original_size(case: dict[str, Any]) -> None:
    model = network(case | {"scaled": case["widths"], "scaled_dim": case["dim"]})
    x = torch.linspace(-1, 1, case["dim"], dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    basis = torch.eye(case["dim"], dtype=torch.float64)
    expected = double_backward(lambda: model(leaf).sum(), [leaf], [basis]).curvature.trace()
    close(jp.laplacian(model, x), expected[None], digits=10)


@pytest.mark.parametrize("name", ["num_dual", "hyperdualnumbers_jl", "confusion", "torch_jet"])
def test_tables_name_their_source(name: str) -> None:
    table = load(name)
    assert "commit" in table["source"]
    assert table["cases"]
