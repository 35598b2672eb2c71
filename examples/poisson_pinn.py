"""A physics-informed network for Poisson's equation: Laplacian u = f on the unit square, u = 0 on its boundary.

The Laplacian of the network with respect to its inputs is one forward pass that carries one second-order row. Its
result has an autograd graph, so the weights are trained by backprop through it.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn

import jetplane as jp


def exact(x: Tensor) -> Tensor:
    """The solution; f below is its Laplacian."""
    return (math.pi * x).sin().prod(-1)


def main(argv: list[str] | None = None) -> None:
    """Train, and compare with the solution."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args(argv).steps

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).double()

    def u(x: Tensor) -> Tensor:  # zero on the boundary by construction
        return (x * (1 - x)).prod(-1) * 16 * network(x).squeeze(-1)

    points = torch.rand(5, 2, dtype=torch.float64)
    truth = -2 * math.pi**2 * exact(points)
    torch.testing.assert_close(jp.laplacian(exact, points, batch_ndim=1), truth)  # exact, on the solution itself

    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for step in range(steps):
        x = torch.rand(64, 2, dtype=torch.float64)
        residual = jp.laplacian(u, x, batch_ndim=1) + 2 * math.pi**2 * exact(x)
        loss = residual.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:4}: mean square of the residual {loss.item():.3f}")
    x = torch.rand(1000, 2, dtype=torch.float64)
    with torch.no_grad():
        error = float((u(x) - exact(x)).norm() / exact(x).norm())
    print(f"relative error of u after {steps} steps: {error:.1%}")
    assert error < 0.1


if __name__ == "__main__":
    main()
