"""What a plan tells: how many tangents, and whether another program is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from classifiers import X, backprop, gradient


def test_the_same_operations_on_other_values_are_another_program() -> None:
    a, b, c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
    model = nn.ModuleList([a, b, c]).double()
    x = X.double()

    def program(swap: bool) -> Callable[[Tensor], Tensor]:
        def losses(x: Tensor) -> Tensor:
            h = a(x)
            k = b(h)
            one, other = (h, k) if swap else (k, h)
            return c(one.relu()).square().sum(1) + 0 * other.sum(1)

        return losses

    estimate = jp.ForwardGradient(model.parameters(), samples=3000, allow_unused=True)
    for swap in (False, True, False, True):
        model.zero_grad()
        estimate(program(swap), x)
        found = gradient(model).clone()
        wanted = backprop(model, program(swap), x)
        assert F.cosine_similarity(found, wanted, dim=0) > 0.97, swap


def test_the_same_operations_on_other_parameters_are_another_program() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    estimate = jp.ForwardGradient([*a.named_parameters("a"), *b.named_parameters("b")])
    estimate(lambda x: b(a(x).relu()).square(), X)
    with pytest.raises(jp.UnsupportedProgram, match=r"the losses do not depend on b\.weight, b\.bias"):
        estimate(lambda x: a(a(x).relu()).square(), X)


@pytest.mark.parametrize(("samples", "tangents"), [(64, 8), (8, 8), (7, 16), (4, 16), (3, 24), (2, 32), (1, 32)])
def test_a_batch_has_as_many_tangents_as_a_sample_has_numbers_of_noise(samples: int, tangents: int) -> None:
    """64 numbers of noise, behind the first layer; from 8 tangents to 32."""
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3)).double()
    x, y = torch.randn(samples, 4, dtype=torch.float64), torch.arange(samples) % 3
    found = []
    for count in (None, tangents):
        model.zero_grad()
        jp.ForwardGradient(model.parameters(), count)(lambda: F.cross_entropy(model(x), y, reduction="none"))
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
