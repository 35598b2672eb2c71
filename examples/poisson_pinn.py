"""A physics-informed network for Poisson's equation: Laplacian u = f on the unit square, u = 0 on its boundary.

The Laplacian of the network with respect to its inputs is one forward pass that carries one second-order row. Its
result has an autograd graph, so the weights are trained by backprop through it. ``--out pinn.svg`` draws the solution
and its error (needs matplotlib).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

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
    parser.add_argument("--out", type=Path, help="draw the solution into this file")
    arguments = parser.parse_args(argv)
    steps = arguments.steps

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
    if arguments.out is not None:
        draw(arguments.out, u)


def draw(path: Path, u: Callable[[Tensor], Tensor]) -> None:
    """The network's solution, and how far it is from the true one."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    axis = torch.linspace(0, 1, 61, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    with torch.no_grad():
        found = u(grid.reshape(-1, 2)).reshape(61, 61)
    figure, both = pyplot.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    parts = ("u, by the network", found), ("its error", found - exact(grid))
    for axes, (title, values) in zip(both, parts, strict=True):
        figure.colorbar(axes.contourf(axis, axis, values, levels=12), ax=axes)
        axes.set(title=title, xlabel="x", ylabel="y", aspect="equal")
    figure.savefig(path)
    print(f"drawn: {path}")


if __name__ == "__main__":
    main()
