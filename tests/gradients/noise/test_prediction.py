"""The prediction of what noise does: the Jacobians become right, stay finite, and are learned the same in parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jetplane as jp
from classifiers import X, Y, backprop, classify, estimated, learned, mlp
from jetplane.gradients.noise import balance


def test_jacobians_of_a_linear_network_become_exact_and_the_noise_vanishes() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 3)).double()
    x, y = torch.randn(32, 5, dtype=torch.float64), torch.arange(32) % 3
    wanted = backprop(model, classify(model), x, y)
    estimate = jp.ForwardGradient(model.parameters(), samples=4)
    first = (estimated(estimate, model, x, y) - wanted).norm()
    for _ in range(100):
        last = (estimated(estimate, model, x, y) - wanted).norm()
    assert last < 1e-3 * first
    state = learned(estimate)
    assert state["calls"] == 101
    torch.testing.assert_close(state["jacobian.1"], model[2].weight.detach(), rtol=0, atol=1e-3)
    torch.testing.assert_close(state["jacobian.0"], (model[2].weight @ model[1].weight).detach(), rtol=0, atol=1e-3)
    assert torch.equal(state["activity.0"], torch.ones(8, dtype=torch.float64))


@pytest.mark.parametrize("samples", [1, 8])
def test_learning_is_stable_however_little_there_is_to_learn_from(samples: int) -> None:
    # thousands of numbers, and one or some products to learn them from: an error must not grow
    model = nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 512), nn.Linear(512, 3)).double()
    x, y = X[:2].double(), Y[:2]
    estimate = jp.ForwardGradient(model.parameters(), samples=samples)
    for _ in range(20):
        estimated(estimate, model, x, y)
    state = learned(estimate)
    exact = {"jacobian.1": model[2].weight.detach(), "jacobian.0": (model[2].weight @ model[1].weight).detach()}
    error = sum((state[key] - value).square().sum() for key, value in exact.items())
    assert error < sum(value.square().sum() for value in exact.values())


def test_what_is_not_predicted_is_measured_and_decides_how_long_noise_is() -> None:
    # the second site is followed by a linear layer, so it is predicted; the first by a curved function
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 5), nn.Linear(5, 3))
    model.double()
    x, y = 3 * torch.randn(64, 4, dtype=torch.float64), torch.arange(64) % 3
    estimate = jp.ForwardGradient(model.parameters(), samples=8)
    for _ in range(400):
        estimated(estimate, model, x, y)
    state = learned(estimate)
    names = [key for key in state if key.startswith("unexplained")]
    hidden = [model[:2](x).detach().requires_grad_()]
    hidden += [model[2:4](hidden[0]).detach().requires_grad_()]
    errors, explained = [], []
    for key, inner, rest in zip(names, hidden, (model[2:], model[4:]), strict=False):
        z = rest(inner)
        slope = (z.softmax(1) - F.one_hot(y, 3)).detach()
        (wanted,) = torch.autograd.grad(F.cross_entropy(rest(inner), y, reduction="sum"), inner)
        known = slope @ state[key.replace("unexplained", "jacobian")]
        errors.append(float((wanted - known).square().sum(1).mean()))
        explained.append(float(known.square().sum(1).mean()))
    assert float(state[names[0]]) == pytest.approx(errors[0], rel=0.3)
    assert errors[1] < 1e-3 * errors[0] and abs(float(state[names[1]])) < 0.02 * errors[0]
    powers = [torch.stack([state[name.replace("un", "", cut)] for name in names]) for cut in (0, 1)]
    assert powers[1][:2].tolist() == pytest.approx(explained, rel=0.3)
    found = balance.lengths(*powers, torch.zeros_like(powers[0]))
    assert found[1] > 2 * found[0]


def test_activity_is_the_share_of_samples_with_a_derivative() -> None:
    model = mlp()
    estimate = jp.ForwardGradient(model.parameters())
    estimated(estimate, model, X, Y)
    alive = (model[0](X) > 0).float().mean(0)
    torch.testing.assert_close(learned(estimate)["activity.0"], alive)
    for _ in range(30):
        estimated(estimate, model, X, Y)
    torch.testing.assert_close(learned(estimate)["activity.0"], alive)
    dead = alive == 0
    assert torch.equal(learned(estimate)["jacobian.0"][:, dead], torch.zeros(3, int(dead.sum())))


def test_a_jacobian_is_used_before_it_learns() -> None:
    # the first call has learned nothing, so it is that without control; what it has learned serves the second
    model = mlp()
    found = [[], []]
    for results, on in zip(found, (True, False), strict=True):
        estimate = jp.ForwardGradient(model.parameters(), samples=2, control=on)
        results += [estimated(estimate, model, X, Y) for _ in range(2)]
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.allclose(found[0][1], found[1][1])


def test_numbers_that_are_not_finite_teach_nothing() -> None:
    model = mlp()
    estimate = jp.ForwardGradient(model.parameters())
    estimated(estimate, model, X, Y)
    before = learned(estimate)
    estimated(estimate, model, X * float("nan"), Y)
    after = learned(estimate)
    assert all(torch.equal(before[key], after[key]) for key in before if "jacobian" in key)
    assert estimated(estimate, model, X, Y).isfinite().all()


def test_chunks_learn_the_same() -> None:
    model = mlp().double()
    x = X.double()
    results = []
    for options in ({}, {"chunk_size": 2}, {"chunk_size": 1}, {"memory": "8 KiB"}):
        estimate = jp.ForwardGradient(model.parameters(), samples=5, **options)
        grads = [estimated(estimate, model, x, Y) for _ in range(3)]
        results.append([*grads, *learned(estimate).values()])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b)
