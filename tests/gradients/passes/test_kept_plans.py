"""Plans are kept, made anew where the program changes, and carried in as many parts as a budget wants."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import jetplane as jp
from classifiers import X, Y, classify, gradient, mlp
from jetplane.ad.run.budget import Trace


@pytest.mark.parametrize("estimator", ["activation", "weight"])
def test_chunks_change_nothing(estimator: str) -> None:
    model = mlp()
    found = []
    for options in ({}, {"chunk_size": 2}, {"chunk_size": 7}, {"memory": "8 KiB"}, {"memory": "1GiB"}):
        model.zero_grad()
        jp.ForwardGradient(model.parameters(), samples=7, estimator=estimator, **options)(classify(model), X, Y)
        found.append(gradient(model).clone())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-6)


def peak(estimate: jp.ForwardGradient, model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The most bytes that a call holds, once the program is known; nothing may wait for the garbage collector."""
    model.zero_grad(set_to_none=False)
    estimate(classify(model), x, y)
    gc.disable()
    try:
        with Trace.of([]) as trace:
            estimate(classify(model), x, y)
    finally:
        gc.enable()
    return trace.peak()


def deep(depth: int) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(32, 32), nn.ReLU())), nn.Linear(32, 3))


def test_memory_is_flat_in_depth_and_within_its_budget() -> None:
    x, y = torch.randn(128, 32), torch.arange(128) % 3
    shallow, net = deep(2), deep(24)
    flat = peak(jp.ForwardGradient(net.parameters(), samples=8), net, x, y)
    assert flat < 1.1 * peak(jp.ForwardGradient(shallow.parameters(), samples=8), shallow, x, y)
    assert flat > 400_000
    assert peak(jp.ForwardGradient(net.parameters(), samples=8, memory=200_000), net, x, y) < 220_000


def test_programs_may_change_between_calls() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    estimate = jp.ForwardGradient(model.parameters(), samples=4, control=False)
    for training in (False, True, False, True):
        model.train(training)
        count = int(model[1].num_batches_tracked)
        fresh = jp.ForwardGradient(model.parameters(), samples=4, step=estimate.step, control=False)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.zero_grad()
        fresh(classify(model), X, Y)
        wanted = gradient(model).clone()
        model.load_state_dict(state)
        model.zero_grad()
        estimate(classify(model), X, Y)
        torch.testing.assert_close(gradient(model), wanted)
        assert int(model[1].num_batches_tracked) == count + training
