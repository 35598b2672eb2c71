"""The passes at the nodes: noise in, derivatives out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from classifiers import X

PARAMETER = nn.Parameter(torch.ones(4, 3))
OTHER = nn.Parameter(torch.ones(3))


def overwritten(x: Tensor) -> Tensor:
    h = x * OTHER[:1]
    y = F.linear(h, PARAMETER.T)
    h.add_(1)
    return y.relu() @ torch.ones(3, 2) @ torch.ones(2)


def test_what_was_overwritten_before_its_derivative_is_refused() -> None:
    with pytest.raises(jp.UnsupportedProgram, match=r"the \(8, 4\) that aten.mm.default read or made was overwritten"):
        jp.forward_gradient(overwritten, {"weight": PARAMETER, "other": OTHER}, X)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, 8), nn.Linear(8, 3)
        self.mixed = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.mixed(self.into(x.reshape(-1, 2, 3)))).mean(1)
        return found


def test_a_batch_of_another_size_is_another_program() -> None:
    """A function without arguments does not say it: the same gradients as of one with the batch as arguments."""
    torch.manual_seed(0)
    model = Attending().double()
    x, y = torch.randn(24, 6, dtype=torch.float64), torch.arange(24) % 3

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    found = []
    for closed in (True, False):
        model.zero_grad()
        estimate = jp.ForwardGradient(model.parameters(), samples=4)
        for part in (slice(0, 7), slice(7, 24), slice(0, 5)):
            if closed:
                estimate(lambda part=part: losses(x[part], y[part]))
            else:
                estimate(losses, x[part], y[part])
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
