"""The named methods against formulas from autograd."""

from __future__ import annotations

import pytest
import torch

from cases import F64, assert_close, randn
from jetplane.curvature import ExactHessian, NoCurvature
from jetplane.directions import Coordinate, Family, Gaussian, Gradient, Orthonormal, Rademacher, Sphere
from jetplane.optim import FGD, FoMoH, FoMoHBP, FoMoHKD, HyperplaneSearch, Newton
from jetplane.solvers import (
    AbsoluteCurvature,
    Damped,
    JitteredInverse,
    NegativeSlope,
    SaddleFree,
    Solver,
    Status,
    TrustRegion,
)
from stepping import derivatives, drawn, fit, leaf, network, params, rosenbrock


def test_named_methods_only_compose() -> None:
    x = leaf(1.0, 2.0, 3.0)
    table = {
        FGD: (Gaussian(1), NoCurvature(), NegativeSlope()),
        FoMoH: (Gaussian(1), ExactHessian(), AbsoluteCurvature()),
        FoMoHBP: (Gradient(), ExactHessian(), AbsoluteCurvature()),
        FoMoHKD: (Gaussian(2), ExactHessian(), JitteredInverse()),
        Newton: (Coordinate(), ExactHessian(), JitteredInverse()),
    }
    for method, parts in table.items():
        opt = method([x])
        assert isinstance(opt, torch.optim.Optimizer)
        assert (opt.directions, opt.curvature, opt.solver) == parts


@pytest.mark.parametrize("family", [Gaussian(5), Rademacher(5), Sphere(5), Orthonormal(5), Coordinate()], ids=str)
def test_as_many_directions_as_dimensions_is_newton(family: Family) -> None:
    x = leaf(-0.3, 0.9, 0.4, -0.5, 0.2)
    assert torch.linalg.matrix_rank(drawn(family, [x], seed=2)) == 5
    gradient, hessian = derivatives(lambda: rosenbrock(x), [x])
    expected = x.detach() - torch.linalg.solve(hessian, gradient)
    HyperplaneSearch([x], 1.0, family, ExactHessian(), JitteredInverse(), seed=2).step(lambda: rosenbrock(x))
    assert_close(x.detach(), expected, 1e-9)


def test_newton_on_a_network() -> None:
    model = network()
    leaves, before = list(model.parameters()), params(model)
    gradient, hessian = derivatives(fit(model), leaves)
    opt = Newton(leaves, lr=0.5)
    opt.step(fit(model))
    assert_close(params(model), before - 0.5 * torch.linalg.solve(hessian, gradient), 1e-9)
    assert opt.report.slope.shape == (21,)


@pytest.mark.parametrize("solver", [JitteredInverse(), SaddleFree(), TrustRegion(1e3), Damped(1e-13)], ids=str)
def test_one_step_solves_a_convex_quadratic(solver: Solver) -> None:
    root = randn(6, 6)
    matrix, centre = root @ root.T + torch.eye(6, dtype=F64), randn(6)
    x = randn(6).requires_grad_()
    opt = HyperplaneSearch([x], 1.0, Gaussian(6), ExactHessian(), solver)
    opt.step(lambda: (x - centre) @ matrix @ (x - centre) / 2)
    assert_close(x.detach(), centre, 1e-9)
    assert_close(opt.report.predicted, opt.report.loss, 1e-9)


@pytest.mark.parametrize("lr", [1.0, 0.3])
def test_fomoh_against_autograd(lr: float) -> None:
    model = network()
    leaves = list(model.parameters())
    opt = FoMoH(leaves, lr=lr, seed=11)
    for step in range(3):
        before = params(model)
        gradient, hessian = derivatives(fit(model), leaves)
        v = drawn(Gaussian(1), leaves, seed=11, step=step)[0]
        kappa = -(v @ gradient) / ((v @ hessian @ v).abs() + 1e-5)
        opt.step(fit(model))
        assert_close(params(model), before + lr * kappa * v, 1e-10)
        assert_close(opt.report.coefficients, kappa.reshape(1), 1e-10)


@pytest.mark.parametrize("lr", [1.0, 0.3])
def test_fomoh_bp_against_autograd(lr: float) -> None:
    model = network()
    leaves = list(model.parameters())
    opt = FoMoHBP(leaves, lr=lr)
    for _ in range(3):
        before = params(model)
        g, hessian = derivatives(fit(model), leaves)
        opt.step(fit(model))
        assert_close(params(model), before - lr * (g @ g) / ((g @ hessian @ g).abs() + 1e-5) * g, 1e-10)
        assert opt.report.evaluations == 2
    assert all(p.grad is None for p in leaves)


@pytest.mark.parametrize("k", [1, 4])
def test_fgd_against_autograd(k: int) -> None:
    model = network()
    leaves, before = list(model.parameters()), params(model)
    gradient, _ = derivatives(fit(model), leaves)
    v = drawn(Gaussian(k), leaves)
    opt = FGD(leaves, lr=1e-2, k=k)
    opt.step(fit(model))
    assert_close(params(model), before - 1e-2 * (v @ gradient) @ v / k, 1e-10)
    assert_close(opt.report.curvature, torch.zeros(k, k, dtype=F64))


def test_fomoh_kd_against_autograd() -> None:
    model = network()
    leaves, before = list(model.parameters()), params(model)
    gradient, hessian = derivatives(fit(model), leaves)
    v = drawn(Gaussian(3), leaves)
    kappa = -torch.linalg.solve(v @ hessian @ v.T, v @ gradient)
    opt = FoMoHKD(leaves, lr=0.7, k=3)
    loss = opt.step(fit(model))
    assert_close(params(model), before + 0.7 * kappa @ v, 1e-9)
    report = opt.report
    assert_close(report.slope, v @ gradient)
    assert_close(report.curvature, v @ hessian @ v.T)
    c = 0.7 * kappa
    assert_close(report.predicted, -(report.slope @ c + c @ report.curvature @ c / 2), 1e-9)
    assert torch.equal(report.loss, loss) and report.actual is None and report.status is Status.OK
    assert report.evaluations == 1
