"""The learned control variate of forward gradients: what it learns, what it saves, and where there is none.

That it leaves the estimate unbiased is tested beside the estimate itself, with any numbers as Jacobians.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from classifiers import X, Y, backprop, classify, estimated, learned, mlp, off
from jetplane.gradients.noise import control_variate as control


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


# -- learning -----------------------------------------------------------------------------------------------------


def test_estimates_become_much_better_while_a_network_trains() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 5))
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    estimate = jp.ForwardGradient(model.parameters(), samples=4)
    cosines: dict[str, list[Tensor]] = {"plain": [], "controlled": []}
    for step in range(200):
        x = torch.randn(128, 16)
        y = teacher(4 * x).argmax(1)
        if step >= 195:
            wanted = backprop(model, classify(model), x, y)[: 16 * 32 + 32 + 32 * 32]  # of the layers with noise
            plain = jp.ForwardGradient(model.parameters(), samples=4, control=False, step=step)
            found = {"plain": estimated(plain, model, x, y), "controlled": estimated(estimate, model, x, y)}
            for name, value in found.items():
                cosines[name].append(F.cosine_similarity(value[: len(wanted)], wanted, dim=0))
        else:
            estimated(estimate, model, x, y)
        adam.step()
    plain, controlled = (float(torch.stack(values).mean()) for values in cosines.values())
    assert controlled > 0.75 and plain < 0.5


# -- chunks, batches, layouts -------------------------------------------------------------------------------------


# -- state --------------------------------------------------------------------------------------------------------


# -- the function -------------------------------------------------------------------------------------------------


def test_programs_with_the_same_shapes_do_not_share() -> None:
    trunk, heads = nn.Linear(4, 6), nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
    named = [*trunk.parameters(), *heads.parameters()]
    estimate = jp.ForwardGradient(named, allow_unused=True)
    for head in heads:
        estimate(lambda x, head=head: F.cross_entropy(head(trunk(x).relu()), Y, reduction="none"), X)
    assert sum(key.endswith("calls") for key in estimate.state_dict()["control"]) == 2


# -- where there is none ------------------------------------------------------------------------------------------


def test_none_is_wanted() -> None:
    model = mlp()
    assert off(model, classify(model), X, Y, control=False)
    assert off(model, classify(model), X, Y, estimator="weight")
    assert not off(model, classify(model), X, Y)


def test_coupled_samples_take_no_part() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), Centred(), nn.Tanh(), nn.Linear(5, 3))
    estimate = jp.ForwardGradient(model.parameters())
    estimated(estimate, model, X, Y)
    coupled = {site.number for site in estimate.sites(classify(model), X, Y) if site.coupled}
    assert coupled == {0}
    assert {key for key in learned(estimate) if "jacobian" in key} == {"jacobian.1"}


def test_where_there_is_none_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "jetplane")
    wide = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 1025))
    assert off(wide, classify(wide), X, Y)
    assert "No control variate at 1 of 1 places where noise enters: the losses depend on 1025 num" in caplog.text
    small = mlp()
    monkeypatch.setattr(control, "_LARGEST", 16)
    monkeypatch.setattr(control, "_SHARE", 0)
    estimate = jp.ForwardGradient(small.parameters())
    estimated(estimate, small, X, Y)
    assert "jacobian.1" in learned(estimate) and "jacobian.0" not in learned(estimate)
    assert "No control variate at 1 of 2 places where noise enters: their Jacobians are too large." in caplog.text
    monkeypatch.setattr(control, "_LARGEST", 1 << 20)
    monkeypatch.setattr(control, "_PROGRAMS", 0)
    assert off(small, classify(small), X, Y)
    assert "2 of 2 places where noise enters: 0 other programs have one." in caplog.text


def test_losses_of_unknown_derivative_have_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jetplane")
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def written(x: Tensor) -> Tensor:
        z = model(x)
        losses = x.new_zeros(len(x), 1)
        view = losses[:, 0]
        losses[:, 0] = z.square().sum(1)
        return view

    assert off(model, written, X)
    assert "the derivative of the losses by what enters them is not known" in caplog.text
    caplog.clear()
    assert off(model, lambda x: model(x[:3]).square().sum() + torch.zeros(8), X)
    assert "what enters the losses cannot be split by sample" in caplog.text
