"""What the transforms read for each sample of a batch, beside torch.func sample by sample."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import jetplane as jp
from cases import randn
from rows_of_functions import A


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_derivatives_of_samples(chunk_size: int | None) -> None:
    x, y, v, w = randn(5, 3), randn(5), randn(5, 3), randn(5)
    u = lambda x, y: ((x @ A.T).tanh() * x.exp()).sum(-1) * y.sin()  # noqa: E731
    rows = list(zip(x, y, strict=True))
    slopes = [torch.func.grad(u, (0, 1))(*row) for row in rows]
    blocks = [torch.func.jacrev(torch.func.jacrev(u, (0, 1)), (0, 1))(*row) for row in rows]
    stacked = lambda trees: torch.utils._pytree.tree_map(lambda *each: torch.stack(each), *trees)  # noqa: E731
    options = {"batch_ndim": 1, "chunk_size": chunk_size}
    torch.testing.assert_close(jp.gradient(u, (x, y), **options), stacked(slopes))
    hessian = jp.hessian(u, (x, y), **options)
    torch.testing.assert_close(hessian, stacked(blocks))
    ((xx, xy), (yx, yy)) = hessian
    assert xx.shape == (5, 3, 3) and xy.shape == yx.shape == (5, 3) and yy.shape == (5,)
    product = ((xx * v[:, None]).sum(-1) + xy * w[:, None], (yx * v).sum(-1) + yy * w)
    torch.testing.assert_close(jp.hvp(u, (x, y), (v, w), **options), product)
    torch.testing.assert_close(jp.hessian(lambda x: u(x, y), x, **options), xx)
    by_name = jp.hessian(lambda p: u(p["x"], p["y"]), {"x": x, "y": y}, **options)
    torch.testing.assert_close(by_name["y"]["x"], yx)


def test_the_hessian_of_samples_can_be_differentiated() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = randn(5, 3)
    jp.hessian(lambda x: net(x)[:, 0], x, batch_ndim=1).square().sum().backward()
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    torch.func.vmap(torch.func.hessian(lambda x: net(x)[0]))(x).square().sum().backward()
    torch.testing.assert_close(found, [p.grad for p in net.parameters() if p.grad is not None])
