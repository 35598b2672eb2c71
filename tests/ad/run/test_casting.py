"""Autocast around a step is for the closure: the same step as with autocast inside the closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jetplane.ad.run.casting import casts_around
from jetplane.curvature import GaussNewton
from jetplane.directions import Best, Momentum, Orthonormal, PreviousStep, RankOne
from jetplane.optim import FoMoHBP, FoMoHKD, GaussNewtonSearch, HorizonAdam, HyperplaneSearch
from jetplane.solvers import LevenbergMarquardt, SaddleFree, TrustRegion
from searches import network

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
LEARNING = [Best(), Momentum(0.9), PreviousStep(), Orthonormal(2)]

OPTIMIZERS: dict[str, tuple[Callable[..., Any], str]] = {
    "horizon": (HorizonAdam, "none"),
    "gauss-newton": (GaussNewtonSearch, "none"),
    "gauss-newton-compiled": (lambda p: GaussNewtonSearch(p, k=4, compile=True), "none"),
    "fomoh-kd": (lambda p: FoMoHKD(p, k=3), "mean"),
    "gradient": (lambda p: FoMoHBP(p, solver=TrustRegion(0.1)), "mean"),
    "rank-one": (lambda p: HyperplaneSearch(p, 1.0, RankOne(4), GaussNewton(), LevenbergMarquardt()), "none"),
    "learning": (lambda p: HyperplaneSearch(p, 1.0, LEARNING, GaussNewton(), SaddleFree()), "none"),
    "memory": (lambda p: HyperplaneSearch(p, 1.0, Orthonormal(2), "ggn", SaddleFree(), memory="1GiB"), "none"),
}


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_autocast_around_a_step_is_autocast_in_its_closure(name: str) -> None:
    make, reduction = OPTIMIZERS[name]

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(X), Y, reduction=reduction)

    def inside(model: nn.Module) -> Tensor:
        with cast():
            return loss(model)

    models = [network(torch.float32) for _ in range(3)]
    around, within, without = (make(list(model.parameters())) for model in models)
    for _ in range(5):  # HorizonAdam looks back every fourth step
        with cast():
            first = around.step(lambda: loss(models[0]))
            # what autocast kept of the parameters before they moved is forgotten
            assert torch.equal(loss(models[0]), inside(models[0]))
        assert torch.equal(within.step(lambda: inside(models[1])), first)
        without.step(lambda: loss(models[2]))
    for one, other, plain in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other) and not torch.equal(one, plain)


def cast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_how_autocast_is_set() -> None:
    cpu = torch.device("cpu")
    assert casts_around(cpu).dtypes == ()
    with cast():
        found = casts_around(cpu)
    assert found.dtypes == (("cpu", torch.bfloat16),)
    closure = found.around(lambda *sizes: torch.mm(torch.ones(sizes), torch.ones(sizes)).dtype)
    assert closure(2, 2) is torch.bfloat16 and not torch.is_autocast_enabled("cpu")
