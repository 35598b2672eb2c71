"""``jetplane demo``: exact curvature of small networks, and Newton's method in random planes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import jetplane as jp
from jetplane.testing.oracle import double_backward


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Enter the command into the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="curvature of small networks, and Newton's method in random planes",
        description="Compare the curvature of small unmodified networks with double backward, minimise the Rosenbrock "
        "function by Newton steps in random planes, and draw a picture. Needs no data and takes a few seconds.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="folder for demo.png (default: %(default)s)"
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print both parts and save the picture."""
    start = time.monotonic()
    networks()
    print()
    flat = minimise(torch.tensor([-1.2, 1.0], dtype=torch.float64), k=2, steps=40)
    runs = [minimise(_start(dimension=10), k=k, steps=1000) for k in (2, 5, 10)]
    report([flat, *runs])
    print()
    picture(flat, runs, arguments.out / "demo.png")
    print(f"{time.monotonic() - start:.1f} s")
    return 0


# -- curvature of networks ----------------------------------------------------------------------------------------


def networks(k: int = 3) -> None:
    """One forward pass against double backward, on ordinary modules."""
    print(f"Loss, slope (K) and curvature (K x K) along K = {k} random directions, from one forward pass.")
    rows = 1 + k + k * (k + 1) // 2
    print(f"Each value carries 1 + K + K(K+1)/2 = {rows} rows: itself, its slopes, its curvatures.\n")
    print(f"{'network':<28}{'parameters':>11}{'loss':>9}{'curvature along v1':>20}{'largest error':>15}")
    for name, model, x in _models():
        generator = torch.Generator().manual_seed(1)
        y = torch.randint(10, (len(x),), generator=generator)
        params = dict(model.named_parameters())
        directions = {n: torch.randn((k, *p.shape), dtype=p.dtype, generator=generator) for n, p in params.items()}

        def loss(model: nn.Module = model, x: Tensor = x, y: Tensor = y) -> Tensor:
            return functional.cross_entropy(model(x), y)

        with jp.perturb(params, directions) as jets:
            value = loss()
        ours = jets.quadratic(value)
        theirs = double_backward(loss, list(params.values()), list(directions.values()))
        error = max(_error(ours.slope, theirs.slope), _error(ours.curvature, theirs.curvature))
        size = sum(p.numel() for p in params.values())
        print(f"{name:<28}{size:>11,}{float(ours.loss):>9.4f}{float(ours.curvature[0, 0]):>20.4f}{error:>15.1e}")
    print("\nThe error is relative to the largest entry, against double backward in float64.")


def _models() -> Iterator[tuple[str, nn.Module, Tensor]]:
    with torch.random.fork_rng(devices=[]):  # layers draw their weights from the global state
        torch.manual_seed(0)
        mlp = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 10))
        cnn = nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(8 * 3 * 3, 10)),
        )
        yield "MLP (LayerNorm, GELU)", mlp.double(), torch.randn(32, 64, dtype=torch.float64)
        yield "CNN (BatchNorm, max-pool)", cnn.double(), torch.randn(32, 1, 8, 8, dtype=torch.float64)


def _error(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


# -- Newton's method in a plane -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A minimisation: the points visited and their values, the start first."""

    k: int
    points: list[Tensor]
    values: list[float]
    passes: int  # forward passes that carry the rows of K directions
    plain: int  # forward passes that compute the value alone, to test a step


def rosenbrock(x: Tensor) -> Tensor:
    """sum_i 100 (x_{i+1} - x_i^2)^2 + (1 - x_i)^2, with its minimum 0 at (1, ..., 1)."""
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def _start(dimension: int) -> Tensor:
    return torch.randn(dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def minimise(x: Tensor, k: int, steps: int, function: Callable[[Tensor], Tensor] = rosenbrock) -> Run:
    """Newton steps, each in a fresh random plane of K directions."""
    generator = torch.Generator().manual_seed(1)
    value = float(function(x))
    points, values, passes, plain = [x], [value], 0, 1
    while passes < steps and value > 1e-16:
        directions = torch.randn((k, len(x)), dtype=x.dtype, generator=generator)
        directions = torch.linalg.qr(directions.mT).Q.mT  # an orthonormal basis of the same plane
        step = newton(jp.quadratic(function, x, directions)) @ directions
        passes += 1
        for _ in range(30):  # halve until it descends
            candidate = float(function(x + step))
            plain += 1
            if candidate < value:
                x, value = x + step, candidate
                break
            step = step / 2
        points.append(x)
        values.append(value)
    return Run(k, points, values, passes, plain)


def newton(quadratic: jp.Quadratic) -> Tensor:
    """The coefficients -|C|^-1 s of the step: absolute eigenvalues, so that negative curvature still gives descent."""
    values, vectors = torch.linalg.eigh(quadratic.curvature)
    scale = values.abs().clamp_min(1e-8 * float(values.abs().max()) + 1e-300)
    return -vectors @ ((vectors.mT @ quadratic.slope) / scale)


def report(runs: list[Run]) -> None:
    """A few values along the way of each run."""
    marks = (0, 10, 30, 100, 300, 1000)
    print("Newton steps in random planes on the Rosenbrock function: value after so many steps.\n")
    head = "".join(f"{mark:>10}" for mark in marks)
    print(f"{'D':>3}{'K':>4}{head}{'final':>10}{'forward passes':>28}")
    for one in runs:
        cells = "".join(f"{one.values[m]:>10.1e}" if m < len(one.values) else f"{'':>10}" for m in marks)
        passes = f"{one.passes} with rows, {one.plain} plain"
        print(f"{len(one.points[0]):>3}{one.k:>4}{cells}{one.values[-1]:>10.1e}{passes:>28}")


# -- picture ------------------------------------------------------------------------------------------------------


def picture(flat: Run, runs: list[Run], path: Path) -> None:
    """The path of the 2-D run over the contours, and the values of the 10-D runs."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed, so there is no picture.")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    _contours(left, flat)
    colours = ("#c44e52", "#dd8452", "#4c72b0")
    for one, colour in zip(runs, colours, strict=True):
        right.plot(one.values, color=colour, linewidth=1.8, label=f"K = {one.k}")
    right.set(
        xscale="symlog", yscale="log", xlabel="step", ylabel="value", title="10-D: a new random plane at each step"
    )
    right.set(xlim=(0, max(one.passes for one in runs)), ylim=(1e-17, None))
    right.set_xticks([0, 1, 10, 100, 1000], ["0", "1", "10", "100", "1000"])
    right.grid(alpha=0.3)
    right.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"picture: {path}")


def _contours(axes: Any, run: Run) -> None:
    from matplotlib.colors import LogNorm

    x, y = torch.meshgrid(torch.linspace(-1.6, 1.6, 321), torch.linspace(-0.6, 1.8, 321), indexing="xy")
    z = torch.vmap(rosenbrock)(torch.stack([x.flatten(), y.flatten()], dim=1)).reshape(x.shape)
    grid = x.numpy(), y.numpy(), z.numpy()
    levels = [10 ** (e / 2) for e in range(-4, 7)]
    axes.contourf(*grid, levels, norm=LogNorm(1e-2, 1e3), cmap="Blues", extend="both")
    axes.contour(*grid, levels, colors="white", linewidths=0.5)
    path = torch.stack(run.points).numpy()
    axes.plot(path[:, 0], path[:, 1], "o-", color="#c44e52", markersize=4, linewidth=1.5, label=f"{run.passes} steps")
    axes.plot(1, 1, "*", color="#ffd23f", markeredgecolor="black", markersize=14, linestyle="none", label="minimum")
    axes.set(xlabel="$x_1$", ylabel="$x_2$", title=f"2-D: K = {run.k}, contours at powers of $\\sqrt{{10}}$")
    axes.legend(loc="lower left", framealpha=0.9)
