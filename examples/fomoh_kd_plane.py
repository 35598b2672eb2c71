"""A FoMoH-KD step, taken apart: two directions, the loss's quadratic model in their plane, and the step to its minimum.

``--out plane.svg`` draws the true loss in the plane, the model, and the step (needs matplotlib).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

import jetplane as jp


def rosenbrock(x: Tensor) -> Tensor:
    """The paper's test function; its minimum is 0 at (1, ..., 1)."""
    return ((1 - x[:-1]) ** 2 + 100 * (x[1:] - x[:-1] ** 2) ** 2).sum()


def main(argv: list[str] | None = None) -> None:
    """Take some steps, look at each, and draw the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dimensions", type=int, default=4)
    parser.add_argument("--out", type=Path, help="draw the plane of the first step into this file")
    arguments = parser.parse_args(argv)

    generator = torch.Generator().manual_seed(2)
    x = torch.full((arguments.dimensions,), -0.5, dtype=torch.float64)
    solver = jp.solvers.SaddleFree()
    start = float(rosenbrock(x))
    for number in range(arguments.steps):
        v = torch.randn(2, len(x), generator=generator, dtype=x.dtype)  # K = 2 directions
        plane = jp.quadratic(rosenbrock, x, v)  # loss (), slope (2,), curvature (2, 2): one forward pass
        step = solver(plane)
        # the model m(c) = loss + slope . c + c . curvature . c / 2 is exact to second order:
        small = 1e-4 * torch.tensor([1.0, -2.0], dtype=x.dtype)
        model = plane.loss + plane.slope @ small + small @ plane.curvature @ small / 2
        assert abs(float(rosenbrock(x + small @ v) - model)) < 1e-6 * float(plane.loss)
        if number == 0 and arguments.out is not None:
            draw(arguments.out, x, v, plane, step.coefficients)
        coefficients = step.coefficients
        while rosenbrock(x + coefficients @ v) > plane.loss:  # far from the start the model is wrong: halve the step
            coefficients = coefficients / 2
        x = x + coefficients @ v
        if number % 10 == 0:
            print(f"step {number:3}: loss {float(plane.loss):.4f}, predicted decrease {float(step.predicted):.4f}")
    print(f"after {arguments.steps} steps: {float(rosenbrock(x)):.2e}, from {start:.2e}")
    assert float(rosenbrock(x)) < 0.5 * start


def draw(path: Path, x: Tensor, v: Tensor, plane: jp.Quadratic, step: Tensor) -> None:
    """Level lines of the loss in the plane, of its model, and the step."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    reach = 1.5 * float(step.norm())
    axis = torch.linspace(-reach, reach, 81, dtype=x.dtype)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)  # (81, 81, 2)
    true = torch.stack([torch.stack([rosenbrock(x + c @ v) for c in row]) for row in grid])
    model = plane.loss + grid @ plane.slope + ((grid @ plane.curvature) * grid).sum(-1) / 2
    figure, axes = pyplot.subplots(figsize=(5, 4.4), layout="constrained")
    levels = true.quantile(torch.tensor([0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95], dtype=x.dtype)).tolist()
    for values, style, colour in ((true, "solid", "#1b6ca8"), (model, "dashed", "#c8553d")):
        axes.contour(axis, axis, values, levels=levels, colors=colour, linestyles=style, linewidths=1)
        axes.plot([], [], color=colour, linestyle=style, label="loss" if values is true else "quadratic model")
    axes.annotate("", tuple(step.tolist()), (0, 0), arrowprops={"arrowstyle": "->", "color": "black"})
    axes.plot(0, 0, "ko", markersize=4, label="where the step begins")
    axes.set(xlabel="along v1", ylabel="along v2")
    axes.legend(loc="upper right")
    figure.savefig(path)
    print(f"drawn: {path}")


if __name__ == "__main__":
    main()
