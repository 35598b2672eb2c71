"""The Laplacian of a network by its inputs, in many dimensions: one forward pass, and the number of double backward.

A Laplacian carries d tangents and one row of second order. With fewer random directions than dimensions it is estimated
without bias, which is for large d. ``--out laplacian.svg`` draws the counted operations (needs matplotlib).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import jetplane as jp


def main(argv: list[str] | None = None) -> None:
    """Compare values and counted operations of two ways to the same number, and an estimate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dimensions", type=int, default=20)
    parser.add_argument("--out", type=Path, help="draw operations against dimensions into this file")
    parser.add_argument("--directions", type=int, default=8, help="of the estimate")
    arguments = parser.parse_args(argv)
    if arguments.out is not None:
        sizes = [2, 5, 10, 20, 40]
        draw(arguments.out, sizes, [compare(d, arguments.directions) for d in sizes])
    else:
        compare(arguments.dimensions, arguments.directions)


def compare(d: int, k: int) -> tuple[int, int]:
    """The operations of ours and of double backward, for a network in d dimensions."""
    torch.manual_seed(0)
    layers = [nn.Linear(d, 64), nn.Linear(64, 64), nn.Linear(64, 1)]
    weights = [(layer.weight.detach().double(), layer.bias.detach().double()) for layer in layers]
    x = torch.randn(16, d, dtype=torch.float64)

    def u(x: Tensor) -> Tensor:  # (16, d) -> (16,)
        for weight, bias in weights[:-1]:
            x = functional.linear(x, weight, bias).tanh()
        return functional.linear(x, *weights[-1]).squeeze(-1)

    def by_backprop(x: Tensor) -> Tensor:  # a backward pass, and another one for each dimension
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(u(x).sum(), x, create_graph=True)
        rows = [torch.autograd.grad(slope[:, i].sum(), x, retain_graph=True)[0][:, i] for i in range(d)]
        return torch.stack(rows).sum(0)

    found, theirs = counted(lambda: jp.laplacian(u, x, batch_ndim=1)), counted(lambda: by_backprop(x))
    for name, (value, count) in (("one forward pass", found), ("double backward", theirs)):
        print(f"{d} dimensions, {name:>16}: {count / 1e6:5.1f} million operations, {value[0]:.6f} at the first point")
        torch.testing.assert_close(value, theirs[0])
    assert found[1] < theirs[1]

    # with directions of variance one the mean of v^T H v is the Laplacian
    signs = (torch.randint(2, (k, 1, d)).double() * 2 - 1).expand(k, *x.shape)
    square = jp.PairSet(k, tuple((i, i) for i in range(k)), (1 / k,) * k)
    estimate = jp.jet(u, x, signs, pairs=square).second[0]
    error = float((estimate - found[0]).norm() / found[0].norm())
    print(f"{d} dimensions, estimated with {k} directions: relative error {error:.2f}")
    assert error < 3.0
    return found[1], theirs[1]


def draw(path: Path, sizes: list[int], counts: list[tuple[int, int]]) -> None:
    """Operations against dimensions."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.4), layout="constrained")
    ours, theirs = zip(*counts, strict=True)
    axes.plot(sizes, [count / 1e6 for count in ours], "o-", color="#1b6ca8", label="one forward pass")
    axes.plot(sizes, [count / 1e6 for count in theirs], "o-", color="#c8553d", label="double backward")
    axes.set(xlabel="dimensions", ylabel="million operations, 16 points", title="Laplacian of a network")
    axes.legend()
    figure.savefig(path)
    print(f"drawn: {path}")


def counted(program) -> tuple[Tensor, int]:
    """What a program returns, and the products and sums of its matrix products."""
    with FlopCounterMode(display=False) as counter:
        value = program()
    return value.detach(), counter.get_total_flops()


if __name__ == "__main__":
    main()
