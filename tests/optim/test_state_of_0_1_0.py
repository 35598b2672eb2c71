"""States of version 0.1.0 load, and training goes on from them as it would have there.

tests/data/v0.1.0/optimizers.pt was written by version 0.1.0: the state of each optimizer below after five steps of a
tiny problem, the parameters then, and the parameters after five more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jetplane as jp
from jetplane.directions import Gaussian, Grown, Momentum, PreviousStep
from jetplane.optim import FoMoHKD, GaussNewtonSearch, HorizonAdam, HyperplaneSearch
from jetplane.optim.horizon import eigenbasis
from jetplane.solvers import LevenbergMarquardt, SaddleFree

KEPT = Path(__file__).parents[1] / "data" / "v0.1.0" / "optimizers.pt"
STEPS = 5  # before the state was saved, and after it


class Estimated:
    """Gradient descent on forward gradients, whose state is that of the estimate."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._estimate = jp.ForwardGradient(params, 2)
        self.state_dict, self.load_state_dict = self._estimate.state_dict, self._estimate.load_state_dict

    def step(self, loss_fn: Callable[..., Tensor], *batch: Tensor) -> None:
        for param in self._params:
            param.grad = None
        self._estimate(loss_fn, *batch)
        with torch.no_grad():
            for param in self._params:
                assert param.grad is not None
                param.sub_(0.1 * param.grad)


def _remembering(params: Sequence[Tensor]) -> HyperplaneSearch:
    families = [PreviousStep(), Momentum([0.5, 0.9]), Gaussian(3)]
    return HyperplaneSearch(params, 0.5, families, "ggn", LevenbergMarquardt())


def _grown(params: Sequence[Tensor]) -> HyperplaneSearch:
    families = [PreviousStep(), Grown(Gaussian, start=4, most=8, patience=2)]
    return HyperplaneSearch(params, 0.5, families, "exact", SaddleFree())


OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], Any]] = {
    "FoMoHKD": lambda params: FoMoHKD(params, 0.1, k=3, seed=3),
    "GaussNewtonSearch": lambda params: GaussNewtonSearch(params, k=4),
    "remembering": _remembering,
    "grown": _grown,
    "HorizonAdam": lambda params: HorizonAdam(params, samples=2),
    "ForwardGradient": Estimated,
}


def problem() -> tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, Tensor]]:
    """A network of a few parameters, whose numbers come from no generator: they are the same for every torch."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(_waves(number + 1.0, param.numel()).reshape(param.shape))
    x, y = _waves(0.3, 8 * 3).reshape(8, 3), torch.arange(8) % 2

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    return model, losses, (x, y)


def _fitting(name: str, losses: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The losses, or their mean for a search that has no use for those of single samples."""
    return (lambda *batch: losses(*batch).mean()) if name in ("FoMoHKD", "grown") else losses


def _waves(frequency: float, count: int) -> Tensor:
    return (torch.arange(1, count + 1, dtype=torch.float64) * frequency).sin()


def _axes_of_0_1_0(states: Iterable[dict[str, Any]]) -> None:
    """HorizonAdam's axes were eigenvectors, which are no continuous function of the moment."""
    for state in (one for one in states if "basis" in one):
        mean = eigenbasis.back(state, state["exp_avg"])
        state["basis"].copy_(torch.linalg.eigh(state["moment"])[1])
        state["exp_avg"].copy_(eigenbasis.away(state, mean))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_of_0_1_0_goes_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eigenbasis, "refresh", _axes_of_0_1_0)
    kept = torch.load(KEPT, weights_only=True)
    model, losses, batch = problem()
    params = list(model.parameters())
    with torch.no_grad():
        for param, before in zip(params, kept[name]["before"], strict=True):
            param.copy_(before)
    optimizer = OPTIMIZERS[name](params)
    optimizer.load_state_dict(kept[name]["state"])
    for _ in range(STEPS):
        optimizer.step(_fitting(name, losses), *batch)
    for param, after in zip(params, kept[name]["after"], strict=True):  # processors round in different ways
        torch.testing.assert_close(param.detach(), after, rtol=1e-8, atol=1e-8)


def test_a_state_of_0_1_0_goes_on_with_the_axes_of_today() -> None:
    kept = torch.load(KEPT, weights_only=True)["HorizonAdam"]
    model, losses, batch = problem()
    with torch.no_grad():
        for param, before in zip(model.parameters(), kept["before"], strict=True):
            param.copy_(before)
    opt = HorizonAdam(model.parameters(), samples=2)
    opt.load_state_dict(kept["state"])
    found = [float(opt.step(losses, *batch)) for _ in range(200)]
    assert found[-1] < 0.5 * found[0]


def test_a_new_optimizer_goes_elsewhere() -> None:
    """The states matter: without them the numbers are others."""
    kept = torch.load(KEPT, weights_only=True)
    for name, make in OPTIMIZERS.items():
        model, losses, batch = problem()
        with torch.no_grad():
            for param, before in zip(model.parameters(), kept[name]["before"], strict=True):
                param.copy_(before)
        optimizer = make(list(model.parameters()))
        for _ in range(STEPS):
            optimizer.step(_fitting(name, losses), *batch)
        assert not torch.allclose(next(model.parameters()).detach(), kept[name]["after"][0], rtol=1e-6, atol=1e-6)
