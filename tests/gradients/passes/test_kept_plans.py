"""Plans are kept, made anew where the program changes, and carried in as many parts as a budget wants."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jetplane as jp
from classifiers import X, Y, classify, gradient, mlp
from jetplane.ad.run.budget import Trace
from jetplane.gradients.passes.kept_plans import Width
from jetplane.gradients.passes.program_passes import Passes
from jetplane.gradients.plan import noise_plan
from jetplane.gradients.plan.noise_plan import NoisePlan


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


@pytest.mark.parametrize("samples", [128, 127])
@pytest.mark.parametrize(("small", "passes"), [(1 << 30, 1), (2_000_000, 2), (1, 8)])
def test_a_budget_is_found_where_none_is_given(
    monkeypatch: pytest.MonkeyPatch, small: int, passes: int, samples: int
) -> None:
    """All at once where it is small, and at most eight passes where it is not; the numbers are the same.

    They have all tangents of some samples; a prime number of samples has a smaller last part.
    """
    monkeypatch.setattr(noise_plan, "_SMALL", small)
    torch.manual_seed(0)
    net, x, y = deep(4).double(), torch.randn(samples, 32, dtype=torch.float64), torch.arange(samples) % 3
    counted: list[int] = []
    carry = Passes.carry

    def counting(self: Passes, plan: NoisePlan, rows: Any, k: int, *args: Any, **options: Any) -> Tensor:
        counted.append(k)
        return carry(self, plan, rows, k, *args, **options)

    found = []
    for options in ({}, {"chunk_size": 16}):
        net.zero_grad()
        estimate = jp.ForwardGradient(net.parameters(), samples=16, **options)
        estimate(classify(net), x, y)
        monkeypatch.setattr(Passes, "carry", counting)
        counted.clear()
        estimate(classify(net), x, y)
        monkeypatch.setattr(Passes, "carry", carry)
        assert counted == [16] * (1 if options else passes)
        found.append(gradient(net).clone())
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("samples", "budget", "even", "size"),
    [
        (256, 1000, False, 256),  # all at once
        (256, 150, False, 32),  # seven parts would do, eight are of one size
        (127, 150, False, 19),  # there are none of one size
        (127, 150, True, 127),
        (254, 150, True, 127),
        (256, 1, False, 32),  # no more than eight
    ],
)
def test_parts_are_of_one_size_where_that_takes_few_more(samples: int, budget: int, even: bool, size: int) -> None:
    """Of a program that holds 1000 bytes with a whole batch, and may hold ``budget``."""
    trace = SimpleNamespace(peak=lambda growth: 1000)
    plan: Any = SimpleNamespace(samples=samples, sites=["one"], trace=trace, budget=0)
    assert Width(1, None, None, least=budget).part(plan, 0, even) == size


def test_less_is_held_where_less_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(128, 32), torch.arange(128) % 3
    net = deep(4)
    plenty = peak(jp.ForwardGradient(net.parameters(), samples=16), net, x, y)
    monkeypatch.setattr(noise_plan, "_SMALL", 1)
    assert peak(jp.ForwardGradient(net.parameters(), samples=16), net, x, y) < plenty / 3


class Attending(nn.Module):
    """Residual layers of attention, read by its first token."""

    def __init__(self, layers: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.mixing = nn.ModuleList(nn.Linear(8, 24) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for mixing, out in zip(self.mixing, self.out, strict=True):
            parts = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in mixing(x).chunk(3, -1))
            mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=self.causal)
            x = x + out(mixed.transpose(1, 2).flatten(2)).tanh()
        return self.head(x if self.causal else x[:, 0])


@pytest.mark.parametrize("causal", [False, True])
def test_a_plan_takes_few_passes_and_tells_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, causal: bool
) -> None:
    torch.manual_seed(0)
    model, x, run, count = Attending(6, causal), torch.randn(4, 5, 8), Passes._run, [0]

    def counting(self: Passes, *args: Any, **options: Any) -> Any:
        count[0] += 1
        return run(self, *args, **options)

    def losses(x: Tensor) -> Tensor:
        return model(x).square().flatten(1).sum(1)

    monkeypatch.setattr(Passes, "_run", counting)
    with caplog.at_level("INFO", "jetplane"):
        sites = jp.ForwardGradient(model.parameters()).sites(losses, x)
    assert count[0] <= (13 if causal else 16)
    assert all((site.reach is not None) == causal for site in sites)
    said = " ".join(caplog.messages)
    assert (
        "planning a program of" in said and "planning: questions 1 to" in said and "samples are told apart at" in said
    )


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
