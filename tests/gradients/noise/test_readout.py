"""The input of the loss, by sample and token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from classifiers import gradient, learned


def test_other_layouts_and_several_inputs_of_a_loss() -> None:
    # sequence first, and a loss of two layers' outputs; all linear, so that everything can be predicted
    first, second, third = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 3)
    model = nn.ModuleList([first, second, third]).double()
    x, y = torch.randn(5, 6, 3, dtype=torch.float64), torch.arange(6) % 3

    def losses(x: Tensor) -> Tensor:
        h = first(x)
        return second(h).square().sum((0, 2)) + F.cross_entropy(third(h.mean(0)), y, reduction="none")

    losses(x).mean().backward()
    wanted = gradient(model).clone()
    estimate = jp.ForwardGradient(model.parameters(), samples=32)
    for _ in range(60):
        model.zero_grad()
        estimate(losses, x)
    assert learned(estimate)["jacobian.0"].shape == (5 * 2 + 3, 5 * 4)
    torch.testing.assert_close(gradient(model), wanted, rtol=0, atol=1e-2 * float(wanted.norm()))
