"""What the probe proves of the samples of a batch, and what it does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import jetplane as jp
from classifiers import X, Y, classify
from jetplane.gradients.program.layout import Layout


def test_dead_layers_are_not_taken_for_proven() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        model[2].bias.fill_(-100.0)
    estimate = jp.ForwardGradient(model.parameters(), samples=2, probe_every=2, coupled="raise")
    first, second = estimate.sites(classify(model), X, Y)
    assert first.layout is None and not first.coupled  # nothing was seen, so nothing is known
    assert second.layout == Layout(0, 1)
    estimate(classify(model), X, Y)
    assert model[0].weight.grad.abs().max() == 0
    with torch.no_grad():
        model[2].bias.zero_()
    estimate(classify(model), X, Y)  # looks again
    assert first.layout == Layout(0, 1)
    assert model[0].weight.grad.abs().max() > 0


def test_coupled_samples_raise() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    estimate = jp.ForwardGradient(model.parameters(), coupled="raise")
    with pytest.raises(
        jp.CoupledSamples, match=r"sample's entries of \(8, 6\), the output of aten.addmm.default in module 0"
    ):
        estimate(classify(model), X, Y)
    jp.ForwardGradient(model.eval().parameters(), coupled="raise")(classify(model), X, Y)
    jp.forward_gradient(classify(model), model.parameters(), X, Y)
    model.train()
    jp.forward_gradient(classify(model), model.parameters(), X, Y)
    with pytest.raises(jp.CoupledSamples):  # also where the plan is known
        jp.forward_gradient(classify(model), model.parameters(), X, Y, coupled="raise")


def test_losses_that_are_nan_say_nothing_of_samples(caplog: pytest.LogCaptureFixture) -> None:
    broken, estimates = X.clone(), []
    broken[3] = torch.nan
    for inputs in (broken, X):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        estimate = jp.ForwardGradient(model.parameters(), samples=2, coupled="raise")
        with caplog.at_level("WARNING", "jetplane"):
            assert estimate(classify(model), inputs, Y).isnan().item() == (inputs is broken)  # and nothing raises
        model.zero_grad()
        estimate.reset()
        estimate(classify(model), X, Y)  # looks again, at the first batch that can tell
        estimates.append([parameter.grad for parameter in model.parameters()])
    assert not caplog.records
    for found, expected in zip(*estimates, strict=True):
        torch.testing.assert_close(found, expected)
