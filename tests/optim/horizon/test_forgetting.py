"""Weights that the loss does not hold are forgotten."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from horizons import F64, data, losses_of, net
from jetplane.optim import HorizonAdam
from jetplane.optim.horizon.forgetting import Forgetting


def _forgetting(slopes: list[float], horizon: float = 20.0) -> Forgetting:
    """That of a weight of length 1, in front of which stands a bias, after these slopes along it."""
    leaves = [torch.zeros(3), torch.ones(1, 1)]
    made = Forgetting(leaves)
    for slope in slopes:
        made.see(
            leaves, [torch.ones(3), torch.full((1, 1), slope)], torch.tensor(horizon, dtype=F64), torch.tensor(True)
        )
    return made


def _share(made: Forgetting, lead: float = -0.5, left: float = 1.0) -> float:
    (share,) = made.shares(*(torch.tensor(number, dtype=F64) for number in (lead, left, 20.0))).values()
    return float(share)


def test_weights_are_forgotten_as_far_as_the_path_is_noise_and_the_loss_is_left() -> None:
    made = _forgetting([1.0, -1.0] * 40)
    assert list(made.shares(*torch.tensor([-0.5, 1.0, 20.0], dtype=F64))) == [1]  # the bias stays
    full = _share(made)
    assert 0.8 / 20 < full <= 1 / 20
    assert _share(made, lead=-0.25) == pytest.approx(full / 2)
    assert _share(made, left=0.5) == pytest.approx(full / 4)
    assert _share(made, lead=-3.0) == _share(made, left=7.0) == full
    assert _share(made, lead=0.3) == _share(made, left=-1.0) == 0
    assert _share(made, lead=math.nan) == _share(made, left=math.nan) == 0


def test_a_weight_that_the_loss_wants_longer_is_kept() -> None:
    assert _share(_forgetting([-1.0] * 40)) == 0
    assert _share(_forgetting([1.0] * 40)) == _share(_forgetting([0.0] * 40)) == 1 / 20
    assert 0 < _share(_forgetting([-2.0, 1.0] * 40)) < 1 / 20  # not sure of it


def test_noise_does_not_lengthen_weights_in_front_of_a_norm() -> None:
    """Labels that cannot be known: all that moves is noise, and the loss stays."""
    generator = torch.Generator().manual_seed(0)
    lengths = []
    for forget in (0.0, 1.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 2))
        opt = HorizonAdam(model.parameters(), samples=2, forget=forget)
        for _ in range(120):
            x, y = torch.randn(16, 8, generator=generator), torch.randint(2, (16,), generator=generator)
            opt.step(losses_of(model), x, y)
        lengths.append(float(model[0].weight.detach().norm()))
    assert lengths[1] < 0.8 * lengths[0]


@pytest.mark.parametrize(("offset", "forgets"), [(0.0, True), (-100.0, False)])
def test_a_loss_that_starts_below_zero_forgets_nothing(offset: float, forgets: bool) -> None:
    """There is no saying how much of it is left."""
    moved = []
    for forget in (0.0, 1.0):
        model, (x, y) = net(), data()
        opt = HorizonAdam(model.parameters(), samples=2, forget=forget)

        def shifted(x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
            return losses_of(model)(x, y) + offset

        opt.step(shifted, x, y)
        state = opt.state_dict()
        state["path"]["trend"] = -0.5  # as if its path had been noise
        opt.load_state_dict(state)
        opt.step(shifted, x, y)
        moved.append(torch.cat([leaf.detach().flatten() for leaf in model.parameters()]))
    assert torch.equal(*moved) is not forgets
