"""What a type checker says of a user's program: `test_package` runs mypy on this file. Nothing here is run."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor

import jetplane as jp
from jetplane import curvature, directions, optim, solvers


def f(x: Tensor) -> Tensor:
    return x.square().sum()


def g(x: Tensor) -> tuple[Tensor, str]:
    return x.square().sum(), "aux"


def by_name(x: dict[str, Tensor]) -> Tensor:
    return x["a"].sum()


def transforms(x: Tensor, v: Tensor, named: dict[str, Tensor]) -> None:
    assert_type(jp.jvp(f, x, x), tuple[Tensor, Tensor])
    assert_type(jp.jvp(g, x, x, has_aux=True), tuple[Tensor, Tensor, str])
    assert_type(jp.hyperdual(f, x, x, x), jp.HyperDual)
    assert_type(jp.hyperdual(g, x, x, x, has_aux=True), tuple[jp.HyperDual, str])
    assert_type(jp.jet(f, x, v, "diagonal", chunk_size=2), jp.Jet)
    assert_type(jp.jet(g, x, v, has_aux=True), tuple[jp.Jet, str])
    assert_type(jp.quadratic(f, x, v, curvature="ggn", memory="1GiB"), jp.Quadratic)
    assert_type(jp.quadratic(g, x, v, has_aux=True), tuple[jp.Quadratic, str])
    assert_type(jp.gradient(f, x), Tensor)
    assert_type(jp.gradient(g, x, has_aux=True, no_grad="follow"), tuple[Tensor, str])
    assert_type(jp.gradient(by_name, named), dict[str, Tensor])
    assert_type(jp.hvp(f, x, x), Tensor)
    assert_type(jp.hvp(g, x, x, has_aux=True), tuple[Tensor, str])
    assert_type(jp.hessian(f, x, batch_ndim=1), Tensor)
    assert_type(jp.hessian(g, x, has_aux=True), tuple[Tensor, str])
    assert_type(jp.hessian(by_name, named), dict[str, dict[str, Tensor]])
    assert_type(jp.laplacian(f, x, batch_ndim=1), Tensor)
    assert_type(jp.hessian(f, x, batch_ndim=1), Tensor)
    assert_type(jp.laplacian(g, x, has_aux=True), tuple[Tensor, str])
    assert_type(jp.compile(jp.quadratic)(f, x, v), jp.Quadratic)
    assert_type(jp.coverage(f, x), jp.Coverage)
    assert_type(jp.verify(f, x), jp.Verification)
    assert_type(jp.mark_output(x), Tensor)


def jets(params: list[torch.nn.Parameter], rows: list[Tensor], loss: Tensor) -> None:
    with jp.perturb(params, rows) as inside:
        assert_type(inside.quadratic(loss), jp.Quadratic)
        assert_type(inside.of(loss), jp.Jet)
    plane = inside.quadratic(loss)
    assert_type(plane.slope, Tensor)
    assert_type(solvers.SaddleFree()(plane), solvers.Step)
    assert_type(solvers.find("cubic"), solvers.Solver)
    assert_type(curvature.find("ggn"), curvature.Curvature)
    assert_type(directions.Gaussian(3), directions.Gaussian)


def gradients(params: list[torch.nn.Parameter], x: Tensor) -> None:
    estimate = jp.ForwardGradient(params)
    assert_type(estimate(f, x), Tensor)
    assert_type(estimate(g, x, has_aux=True), tuple[Tensor, str])
    assert_type(estimate.steps(f, x), Tensor)
    assert_type(jp.forward_gradient(f, params, x, samples=4), Tensor)
    assert_type(jp.forward_gradient(g, params, x, has_aux=True), tuple[Tensor, str])


def optimizers(params: list[torch.nn.Parameter], x: Tensor) -> None:
    plane, horizon = optim.FoMoHKD(params, k=2), optim.HorizonAdam(params)
    assert_type(plane.step(f, x), Tensor)
    assert_type(horizon.step(f, x), Tensor)
    assert_type(horizon.report, optim.HorizonReport)
    assert_type(optim.GaussNewtonSearch(params).step(f, x), Tensor)
    assert_type(optim.MeZO(params).step(f, x), Tensor)
    found = jp.minimize(f, x)
    assert_type(found, optim.Result)
    assert_type(found.fun, float)
