"""The estimator with tangents of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import jetplane as jp
from classifiers import X, Y, backprop, classify, gradient
from jetplane.directions import Gaussian, Plane


def test_there_are_as_many_weight_tangents_as_activations_have_at_least() -> None:
    found = []
    for samples in (None, 8, 9):
        model = nn.Linear(4, 3)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.ones_(model.bias)
        jp.ForwardGradient(model.parameters(), samples, estimator="weight")(classify(model), X, Y)
        found.append(model.weight.grad)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_the_estimate_is_the_gradient_seen_along_the_directions(chunk_size: int | None) -> None:
    """sum_j (v_j . g) v_j / J, with g by a backward pass and the v_j as they are drawn."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    x, leaves = X.double(), list(model.parameters())
    wanted = backprop(model, classify(model), x, Y)
    drawn = Gaussian(5).draw(Plane(7, 2, 0, [leaf.detach() for leaf in leaves], list))
    rows = torch.cat([drawn.rows(n, leaf.detach(), 0, 5).flatten(1) for n, leaf in enumerate(leaves)], 1)
    estimate = jp.ForwardGradient(leaves, 5, estimator="weight", seed=7, step=2, chunk_size=chunk_size)
    with jp.forward_only():
        loss = estimate(classify(model), x, Y)
    torch.testing.assert_close(gradient(model), rows.T @ (rows @ wanted) / 5)
    torch.testing.assert_close(loss, classify(model)(x, Y).mean().detach())


def test_losses_that_are_detached_are_refused() -> None:
    weight = torch.ones(3, requires_grad=True)
    estimate = jp.ForwardGradient([weight], estimator="weight")
    with pytest.raises(ValueError, match="detaches its result from all that varies"):
        estimate(lambda x: (x * weight).sum(1).detach(), torch.ones(4, 3))
    assert weight.grad is None
