"""What the transforms read for each sample of a batch."""

from __future__ import annotations

import torch
from torch import nn

import jetplane as jp
from cases import randn


def test_the_hessian_of_samples_has_the_primals_structure_twice() -> None:
    x, y = randn(5, 3), randn(5)
    u = lambda p: p["x"].exp().sum(-1) * p["y"].sin()  # noqa: E731
    found = jp.hessian(u, {"x": x, "y": y}, batch_ndim=1)
    torch.testing.assert_close(found["x"]["x"], torch.diag_embed(x.exp() * y.sin()[:, None]))
    torch.testing.assert_close(found["y"]["x"], x.exp() * y.cos()[:, None])
    torch.testing.assert_close(found["x"]["y"], found["y"]["x"])
    torch.testing.assert_close(found["y"]["y"], -u({"x": x, "y": y}))


def test_the_hessian_of_samples_can_be_differentiated() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = randn(5, 3)
    jp.hessian(lambda x: net(x)[:, 0], x, batch_ndim=1).square().sum().backward()
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    torch.func.vmap(torch.func.hessian(lambda x: net(x)[0]))(x).square().sum().backward()
    torch.testing.assert_close(found, [p.grad for p in net.parameters() if p.grad is not None])
