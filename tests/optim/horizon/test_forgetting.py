"""Weights that the loss does not hold are forgotten."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from horizons import F64, data, losses_of, net
from jetplane.optim import HorizonAdam
from jetplane.optim.horizon.forgetting import Forgetting


def _forgetting(slopes: list[float], start: float = 0.0) -> Forgetting:
    """That of a weight of length 1, which was ``start``, behind a bias, after these slopes along it."""
    made = Forgetting([torch.zeros(3), torch.zeros(1, 1)])
    horizon, taken = torch.tensor(20.0, dtype=F64), torch.tensor(True)
    for length, slope in ((start, 0.0), *((1.0, slope) for slope in slopes)):
        leaves, grads = ([torch.ones(3), torch.full((1, 1), number)] for number in (length, slope))
        made.see(leaves, grads, horizon, taken)
    return made


def _share(made: Forgetting, lead: float = -0.5, left: float = 1.0, forget: float = 1.0) -> float:
    (share,) = made.shares(forget, *(torch.tensor(number, dtype=F64) for number in (lead, left, 20.0))).values()
    return float(share)


def test_weights_are_forgotten_as_far_as_the_path_is_noise_and_the_loss_is_left() -> None:
    made = _forgetting([1.0, -1.0] * 40)
    assert list(made.shares(1.0, *torch.tensor([-0.5, 1.0, 20.0], dtype=F64))) == [1]  # the bias stays
    full = _share(made)
    assert 0.8 / 20 < full <= 1 / 20
    assert _share(made, lead=-0.25) == pytest.approx(full / 2)
    assert _share(made, left=0.5) == pytest.approx(full / 4)
    assert _share(made, forget=2.0) == pytest.approx(2 * full)
    assert _share(made, lead=-3.0) == _share(made, left=7.0) == full
    assert _share(made, lead=0.3) == _share(made, left=-1.0) == 0
    assert _share(made, lead=math.nan) == _share(made, left=math.nan) == 0


def test_a_weight_that_the_loss_wants_longer_is_kept() -> None:
    assert _share(_forgetting([-1.0] * 40)) == 0
    assert _share(_forgetting([1.0] * 40)) == _share(_forgetting([0.0] * 40)) == 1 / 20
    assert 0 < _share(_forgetting([-2.0, 1.0] * 40)) < 1 / 20  # not sure of it


@pytest.mark.parametrize(("start", "share"), [(0.0, 0.05), (0.94, 0.05), (0.98, 0.02), (1.0, 0.0), (1.5, 0.0)])
def test_no_weight_is_pulled_to_less_than_its_length_at_first(start: float, share: float) -> None:
    assert _share(_forgetting([0.0] * 40, start)) == pytest.approx(share, abs=1e-7)


def test_what_was_learned_before_is_not_forgotten_with_the_noise() -> None:
    """Labels that cannot be known, and a path that is all noise: weights keep the length that they came with."""
    generator, model = torch.Generator().manual_seed(0), net()
    before = [leaf.detach().norm() for leaf in model.parameters()]
    opt = HorizonAdam(model.parameters(), samples=2, rate=1e-3)
    for _ in range(60):
        x, y = data()
        opt.step(losses_of(model), x, y[torch.randperm(len(y), generator=generator)])
        state = opt.state_dict()
        state["path"]["trend"] = -0.5
        opt.load_state_dict(state)
    for leaf, length in zip(model.parameters(), before, strict=True):
        assert leaf.ndim == 1 or leaf.detach().norm() > 0.98 * length


def test_a_state_without_lengths_goes_on_without_them() -> None:
    made = _forgetting([0.0] * 40, start=1.0)
    made.load(made.known[:2].tolist())
    made.see(
        [torch.ones(3), torch.ones(1, 1)], [torch.ones(3), torch.zeros(1, 1)], torch.tensor(20.0), torch.tensor(True)
    )
    assert _share(made) == pytest.approx(0.05)


def test_noise_does_not_lengthen_weights_in_front_of_a_norm() -> None:
    """Labels that cannot be known: all that moves is noise, and the loss stays."""
    generator = torch.Generator().manual_seed(0)
    grown = []
    for forget in (0.0, 1.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 2))
        before = float(model[0].weight.detach().norm())
        opt = HorizonAdam(model.parameters(), samples=2, forget=forget, rate=1e-2)
        for _ in range(120):
            x, y = torch.randn(16, 8, generator=generator), torch.randint(2, (16,), generator=generator)
            opt.step(losses_of(model), x, y)
        grown.append(float(model[0].weight.detach().norm()) / before)
    assert grown[0] > 1.1 and 0.95 < grown[1] < 1.02


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
        state["path"]["trend"] = -0.5  # as if its path had been noise, and
        opt.load_state_dict(state)
        with torch.no_grad():
            model[0].weight.mul_(1.5)  # had made a weight longer
        opt.step(shifted, x, y)
        moved.append(torch.cat([leaf.detach().flatten() for leaf in model.parameters()]))
    assert torch.equal(*moved) is not forgets
