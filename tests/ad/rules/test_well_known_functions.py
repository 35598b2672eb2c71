"""Functions of other packages, by name: the classes here carry their names, with bodies and backwards written anew."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import jetplane as jp
from jetplane.ad.algebra import registry


def _named(name: str, **members: Any) -> Any:
    """A Function that is found under a dotted name."""
    module, _, own = name.rpartition(".")
    made = type(own, (Function,), {key: staticmethod(value) for key, value in members.items()})
    made.__module__, made.__qualname__ = module, own
    return made


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    def enter(name: str, **members: Any) -> None:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))  # type: ignore[arg-type]

    yield enter


def _plane(f: Callable[[Tensor], Tensor], x: Tensor) -> jp.Quadratic:
    return jp.quadratic(f, (x,), (torch.eye(x.numel(), dtype=x.dtype).reshape(-1, *x.shape),))


def _check(f: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """The plane of ``f`` is that of ``plain`` by double backward."""
    plane = _plane(f, x)
    slope = torch.autograd.functional.jacobian(plain, x).flatten()
    torch.testing.assert_close(plane.slope, slope)
    torch.testing.assert_close(plane.curvature, torch.autograd.functional.hessian(plain, x).reshape(x.numel(), -1))


def test_a_transparent_function_is_its_body() -> None:
    gelu = _named(
        "transformers.models.bloom.modeling_bloom.GeLUFunction",
        forward=lambda ctx, x: x * 0.5 * (1 + torch.tanh(0.8 * x * (1 + 0.04 * x * x))),
        backward=lambda ctx, g: g,
    )
    x = torch.randn(3, dtype=torch.float64)
    _check(lambda x: gelu.apply(x).sum(), lambda x: (x * 0.5 * (1 + torch.tanh(0.8 * x * (1 + 0.04 * x * x)))).sum(), x)


def test_an_unknown_function_is_refused_and_a_name_makes_it_known() -> None:
    mine = _named("somebody.layers.Cube", forward=lambda ctx, x: x**3, backward=lambda ctx, g: g)
    x = torch.tensor([2.0], dtype=torch.float64)
    with pytest.raises(jp.MissingRule, match=r"Cube has no rule.*jetplane\.register\.transparent\(Cube\)"):
        _plane(lambda x: mine.apply(x).sum(), x)
    jp.register.transparent("somebody.layers.Cube")
    try:
        assert _plane(lambda x: mine.apply(x).sum(), x).curvature.item() == 12
        with pytest.raises(ValueError, match=r"somebody\.layers\.Cube already has a rule of family 'transparent'"):
            jp.register.transparent("somebody.layers.Cube")
        jp.register.composite(mine, lambda x: x**2)  # the class itself comes before its name
        assert _plane(lambda x: mine.apply(x).sum(), x).curvature.item() == 2
        jp.register.remove(mine)
    finally:
        jp.register.remove("somebody.layers.Cube")


def test_an_assignment_behind_autograds_back() -> None:
    def forward(ctx: Any, scratch: Tensor, value: Tensor, index: Any) -> Tensor:
        scratch.data[index] = value
        return scratch

    assign = _named("torchdiffeq._impl.rk_common._UncheckedAssign", forward=forward, backward=lambda ctx, g: g)

    def f(x: Tensor) -> Tensor:
        k = torch.zeros(2, 3, dtype=x.dtype)
        k = assign.apply(k, x.sin(), 0)
        k = assign.apply(k, k[0] * x, 1)
        return k.square().sum()

    def plain(x: Tensor) -> Tensor:
        return torch.stack([x.sin(), x.sin() * x]).square().sum()

    _check(f, plain, torch.randn(3, dtype=torch.float64))


def test_a_stitched_gradient_is_that_of_the_first() -> None:
    stitch = _named("torchdiffeq._impl.misc._StitchGradient", forward=lambda ctx, x, out: out, backward=None)
    x = torch.randn(3, dtype=torch.float64)
    assert _plane(lambda x: stitch.apply(x * x, x.detach() + 5).sum(), x).loss == (x + 5).sum()
    _check(lambda x: stitch.apply(x * x, x.detach() + 5).sum(), lambda x: (x * x).sum(), x)


def test_an_adjoint_solve_is_differentiated_through_its_steps(modules: Callable[..., None]) -> None:
    def euler(func: Any, y0: Tensor, t: Tensor, **_: Any) -> Tensor:
        y = y0
        for step in t.diff():
            y = y + step * func(t, y)
        return y

    modules("torchdiffeq._impl.adjoint", odeint=euler)
    solve = _named("torchdiffeq._impl.adjoint.OdeintAdjointMethod", forward=lambda ctx, *args: None, backward=None)
    t, start = torch.linspace(0, 1, 5, dtype=torch.float64), torch.ones(3, dtype=torch.float64)

    def f(w: Tensor) -> Tensor:
        def field(t: Tensor, y: Tensor) -> Tensor:
            return (w * y).sin()

        return solve.apply(
            None, field, start, t, 1e-7, 1e-9, "euler", None, None, 1e-7, 1e-9, "euler", None, False, w
        ).sum()

    _check(f, lambda w: euler(lambda t, y: (w * y).sin(), start, t).sum(), torch.randn(3, dtype=torch.float64))


def test_a_root_with_a_bounded_slope(modules: Callable[..., None]) -> None:
    name = "transformers.models.recurrent_gemma.modeling_recurrent_gemma"
    modules(name, _MAX_SQRT_GRADIENT=10.0)
    root = _named(f"{name}.SqrtBoundDerivative", forward=lambda ctx, x: x.sqrt(), backward=None)
    plane = _plane(lambda x: root.apply(x).sum(), torch.tensor([4.0, 1e-6, 0.0], dtype=torch.float64))
    torch.testing.assert_close(plane.slope, torch.tensor([0.25, 10.0, 10.0], dtype=torch.float64))
    torch.testing.assert_close(plane.curvature.diagonal(), torch.tensor([-1 / 32, 0, 0], dtype=torch.float64))
    assert plane.loss.item() == pytest.approx(2 + 1e-3)


def test_an_integral_varies_with_its_ends_and_its_integrand(modules: Callable[..., None]) -> None:
    def quadrature(f: Callable[[Tensor], Tensor], a: Tensor, b: Tensor, n: int) -> Tensor:
        nodes = (torch.arange(n, dtype=a.dtype) + 0.5) / n
        return sum(f(a + (b - a) * node) for node in nodes) * (b - a) / n  # type: ignore[return-value]

    modules("zuko.utils", GaussLegendre=SimpleNamespace(quadrature=quadrature))
    integral = _named("zuko.utils.GaussLegendre", forward=lambda ctx, *args: None, backward=None)
    x = torch.tensor([0.3, 1.1, 0.7], dtype=torch.float64)  # a, b and c of the integral of exp(c s)

    def f(x: Tensor) -> Tensor:
        return integral.apply(lambda s: torch.exp(x[2] * s), x[0], x[1], 2000, x[2])

    plane = _plane(f, x)
    exact = torch.autograd.functional
    closed = lambda x: (torch.exp(x[2] * x[1]) - torch.exp(x[2] * x[0])) / x[2]  # noqa: E731
    torch.testing.assert_close(plane.slope, exact.jacobian(closed, x), rtol=1e-6, atol=0)
    torch.testing.assert_close(plane.curvature, exact.hessian(closed, x), rtol=1e-6, atol=1e-12)
    assert math.isclose(plane.loss.item(), closed(x).item(), rel_tol=1e-6)


def test_names_are_found_for_operations_and_functions() -> None:
    assert registry.dotted(torch.ops.aten.mul) == registry.dotted(torch.ops.aten.mul.Tensor) == "aten.mul"
    assert registry.lookup(_named("somebody.else.Other")) is None


def test_a_slope_that_only_the_backward_knows(modules: Callable[..., None]) -> None:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.exp())
        return (x > 0).to(x.dtype)

    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, grown = ctx.saved_tensors
        return g * x * grown

    step = _named("gpytorch.functions._log_normal_cdf.LogNormalCDF", forward=forward, backward=backward)
    modules("gpytorch.functions._log_normal_cdf", LogNormalCDF=step)
    x = torch.tensor([0.4, -0.3, 1.1], dtype=torch.float64)
    assert _plane(lambda x: step.apply(x.sin()).sum(), x).loss.item() == 2
    _check(lambda x: step.apply(x.sin()).sum(), lambda x: ((x.sin() - 1) * x.sin().exp()).sum(), x)


def test_entmax_by_bisection_varies_as_its_closed_form(modules: Callable[..., None]) -> None:
    def sparse(x: Tensor, kept: Tensor) -> Tensor:  # sparsemax with this support
        return torch.where(kept, x - (x[kept].sum() - 1) / kept.sum(), 0.0)

    def forward(ctx: Any, x: Tensor, alpha: float, dim: int, n_iter: int = 50) -> Tensor:
        assert alpha == 2 and n_iter == 40
        return sparse(x, kept)

    modules("entmax.root_finding", EntmaxBisectFunction=SimpleNamespace(forward=forward))
    bisection = _named("entmax.root_finding.SparsemaxBisectFunction", forward=lambda ctx, *args: None, backward=None)
    x = torch.tensor([0.9, 0.7, -2.0, 0.3], dtype=torch.float64)
    kept = torch.tensor([True, True, False, True])
    weight = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    _check(
        lambda x: (bisection.apply(x.sin(), -1, 40).exp() * weight).sum(),
        lambda x: (sparse(x.sin(), kept).exp() * weight).sum(),
        x,
    )


@pytest.mark.parametrize("has_left", [False, True])
def test_a_linear_system_varies_as_its_exact_solution(has_left: bool, modules: Callable[..., None]) -> None:
    def forward(ctx: Any, tree: Any, has_left: bool, b: Tensor, matrix: Tensor) -> Tensor:
        assert not has_left
        return torch.linalg.solve(tree(matrix).to_dense(), b)

    def tree(matrix: Tensor) -> Any:
        return SimpleNamespace(to_dense=lambda: matrix, matmul=lambda x: matrix @ x)

    solve = _named("linear_operator.functions._solve.Solve", forward=lambda ctx, *args: None, backward=None)
    modules("linear_operator.functions._solve", Solve=SimpleNamespace(forward=forward))
    x = torch.tensor([0.3, 1.1, 0.7], dtype=torch.float64)
    parts = lambda x: (x.exp()[None], x.sin(), torch.diag(x + 2) + x.outer(x.cos()))  # noqa: E731
    given = (lambda x: parts(x)) if has_left else (lambda x: parts(x)[1:])

    def plain(x: Tensor) -> Tensor:
        left, b, matrix = parts(x)
        found = torch.linalg.solve(matrix, b)
        return ((left @ found) if has_left else found).exp().sum()

    _check(lambda x: solve.apply(tree, has_left, *given(x)).exp().sum(), plain, x)
