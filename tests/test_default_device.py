"""Nothing depends on torch's default device. ``meta`` stands for a GPU: what is made on it by mistake is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from jetplane import optim
from jetplane_lab import data, functions
from jetplane_lab.training import batches

X, Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("make", "reduction"),
    [
        (lambda params: optim.FGD(params, 0.01), "mean"),
        (lambda params: optim.FoMoH(params, 0.1), "mean"),
        (lambda params: optim.FoMoHKD(params, 0.1, k=3), "mean"),
        (lambda params: optim.FoMoHBP(params, 0.1), "mean"),
        (lambda params: optim.GaussNewtonSearch(params, k=4), "none"),
        (lambda params: optim.HorizonAdam(params, samples=2), "none"),
    ],
)
def test_optimizers_step(make: Callable[[list[Tensor]], optim.HyperplaneSearch], reduction: str) -> None:
    model, other = network(), network()
    other.load_state_dict(model.state_dict())

    def run(model: nn.Module) -> list[Tensor]:
        opt = make(list(model.parameters()))
        for _ in range(6):  # HorizonAdam looks back every fourth step
            opt.step(lambda: F.cross_entropy(model(X), Y, reduction=reduction))
        return list(model.parameters())

    with torch.device("meta"):
        found = run(model)
    for ours, theirs in zip(found, run(other), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("estimator", ["activation", "weight"])
def test_forward_gradients(estimator: str) -> None:
    model = network()
    with torch.device("meta"):
        jp.ForwardGradient(model.parameters(), samples=3, estimator=estimator)(
            lambda: F.cross_entropy(model(X), Y, reduction="none")
        )
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_functions_and_data() -> None:
    x = torch.ones(3, dtype=torch.float64)
    digits = data.load("digits").train
    with torch.device("meta"):
        assert jp.verify(lambda x: (x**3).sum(), x).ok
        assert torch.equal(jp.hessian(lambda x: (x**3).sum(), x), 6 * torch.diag(x))
        jp.minimize(lambda x: (x - 1).square().sum(), 2 * x)
        starts = [function.start(2, 0) for function in functions.FUNCTIONS.values()]
        order = batches.order(5, 0, 0, torch.device("cpu"))
        held = data.hold_out(digits, 10, seed=0)
    assert {tensor.device.type for tensor in [*starts, order, held[0].labels]} == {"cpu"}
