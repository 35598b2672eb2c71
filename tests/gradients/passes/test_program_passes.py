"""The passes of one call see the same program, and leave what a single run leaves."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import jetplane as jp
from classifiers import X, Y, classify
from jetplane.gradients.noise.signs import Signs
from jetplane.gradients.passes.program_passes import Passes


@pytest.mark.parametrize(
    ("activation", "zeros"),
    [(nn.ReLU(), True), (nn.ReLU6(), True), (nn.Hardtanh(), True), (nn.LeakyReLU(), False), (nn.GELU(), False)],
    ids=lambda value: str(value),
)
def test_noise_is_zero_only_where_the_derivative_is(
    activation: nn.Module, zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nn.Linear(4, 16), nn.Linear(16, 3)
    with torch.no_grad():
        second.weight.copy_(torch.eye(16)[:3] * 0 + 1)  # the losses' tangents are sums of the noise
    hidden = first(X)
    with torch.no_grad():
        slopes = torch.func.jvp(activation, (hidden,), (torch.ones_like(hidden),))[1]
    assert bool((slopes == 0).any()) == zeros
    rows = Signs(0, 0).rows(0, 0, 1, hidden)[0]
    expected = torch.where(slopes == 0, 0.0, rows).sum(1) * 3
    scalars: list[Tensor] = []
    estimate = jp.ForwardGradient([*first.parameters(), *second.parameters()])
    carry = Passes.carry
    monkeypatch.setattr(Passes, "carry", lambda *args, **kw: scalars.append(carry(*args, **kw)) or scalars[-1])
    estimate(lambda x: second(activation(first(x))).sum(1), X)
    torch.testing.assert_close(scalars[-1][0].squeeze(1), expected)


def test_buffers_and_random_state_are_as_after_one_run() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3))
    estimate = jp.ForwardGradient(model.parameters(), samples=4, chunk_size=1)
    for _ in range(2):  # planned, and as planned
        before = {name: value.clone() for name, value in model.state_dict().items()}
        start = torch.get_rng_state()
        model(X)
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        end = torch.get_rng_state()
        model.load_state_dict(before)
        torch.set_rng_state(start)
        estimate(classify(model), X, Y)
        assert torch.equal(torch.get_rng_state(), end)
        for name, value in model.state_dict().items():
            assert torch.equal(value, wanted[name]), name


def test_a_program_that_keeps_something_from_call_to_call_is_refused() -> None:
    first, second, calls = nn.Linear(4, 5), nn.Linear(5, 3), [0.0]

    def losses(x: Tensor) -> Tensor:
        calls[0] += 1.0
        return classify(second)(first(x).tanh() * calls[0], Y)

    parameters = [*first.parameters(), *second.parameters()]
    with pytest.raises(
        jp.UnsupportedProgram, match=r"other losses when it was called again .*, by up to \d.*; expected"
    ):
        jp.forward_gradient(losses, parameters, X)
    assert all(parameter.grad is None for parameter in parameters)


def test_buffers_that_are_assigned_and_any_random_numbers_are_as_in_one_run() -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)
            self.register_buffer("mean", torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).tanh() * (1 + random.random())
            self.mean = 0.5 * self.mean + h.detach().mean(0)
            return self.b(h - self.mean)

    model = Averaging()
    random.seed(1)
    wanted = classify(model)(X, Y).mean()
    mean, model.mean = model.mean, torch.zeros(5)
    random.seed(1)
    assert torch.allclose(jp.forward_gradient(classify(model), model.parameters(), X, Y), wanted)
    torch.testing.assert_close(model.mean, mean)
