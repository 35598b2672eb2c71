"""The largest Hessian eigenvalues of a small ResNet, by Lanczos on exact Hessian-vector products from forward passes.

A product costs as many directions as there are parameters, so this is for small models, or for the parameters of one
layer. With many parameters look at the projected Hessian along K directions, at the end. ``--out spectrum.svg`` draws
the eigenvalues that Lanczos finds (needs matplotlib).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import jetplane as jp


class Residual(nn.Module):
    """x + convolution(gelu(norm(x)))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, channels)
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolution(functional.gelu(self.norm(x)))


def main(argv: list[str] | None = None) -> None:
    """Lanczos, checked by what an eigenvector is, and by double backward."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16, help="of Lanczos")
    parser.add_argument("--out", type=Path, help="draw the eigenvalues into this file")
    arguments = parser.parse_args(argv)
    steps = arguments.steps

    torch.manual_seed(0)
    stem, head = nn.Conv2d(1, 3, 3, stride=2), nn.Linear(3, 3)
    model = nn.Sequential(stem, Residual(3), Residual(3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head).double()
    x, y = torch.randn(8, 1, 9, 9, dtype=torch.float64), torch.arange(8) % 3
    params = {name: p.detach() for name, p in model.named_parameters()}
    sizes = [p.numel() for p in params.values()]

    def loss(params: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(torch.func.functional_call(model, params, x), y)

    def tree(flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split(sizes, dim=-1)
        return {n: part.reshape(*flat.shape[:-1], *p.shape) for (n, p), part in zip(params.items(), parts, strict=True)}

    def product(v: Tensor) -> Tensor:  # H v, without a backward pass
        return torch.cat([part.flatten() for part in jp.hvp(loss, params, tree(v)).values()])

    values, vectors = lanczos(product, sum(sizes), steps)
    print(f"{sum(sizes)} parameters; largest eigenvalues: {', '.join(f'{v:.4f}' for v in values[:4].tolist())}")
    residual = float((product(vectors[0]) - values[0] * vectors[0]).norm() / values[0])
    print(f"|H q - lambda q| / lambda of the first: {residual:.1e}")
    assert residual < 1e-4

    gradient = torch.func.grad(loss)
    backward = torch.func.jvp(gradient, (params,), (tree(vectors[0]),))[1]  # forward over reverse, for comparison
    theirs = sum((a * b).sum() for a, b in zip(backward.values(), tree(vectors[0]).values(), strict=True))
    assert abs(float(theirs - values[0])) < 1e-6 * float(values[0])

    plane = jp.quadratic(loss, params, tree(vectors[:3]))  # the projected Hessian: K directions, one pass
    print("projected on the first three:", [f"{v:.4f}" for v in plane.curvature.diagonal().tolist()])
    assert abs(float(plane.curvature[0, 0] - values[0])) < 1e-8 * float(values[0])
    if arguments.out is not None:
        draw(arguments.out, values)


def draw(path: Path, values: Tensor) -> None:
    """Ritz values: the outer ones are eigenvalues, the inner ones show where many lie."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
    axes.stem(values.tolist(), [1.0] * len(values), linefmt="#1b6ca8", markerfmt="o", basefmt=" ")
    axes.set(xlabel="eigenvalue of the Hessian (Ritz values)", yticks=[], ylim=(0, 1.2))
    axes.axvline(0, color="black", linewidth=0.8)
    figure.savefig(path)
    print(f"drawn: {path}")


def lanczos(product, size: int, steps: int) -> tuple[Tensor, Tensor]:
    """Ritz values, the largest first, and their vectors (steps, size); orthogonalised fully."""
    basis = [functional.normalize(torch.randn(size, dtype=torch.float64), dim=0)]
    rows = []
    for _ in range(steps):
        rows.append(product(basis[-1]))
        known = torch.stack(basis)
        new = rows[-1] - known.T @ (known @ rows[-1])
        new = new - known.T @ (known @ new)
        basis.append(new / new.norm())
    known = torch.stack(basis[:-1])
    projected = known @ torch.stack(rows).T
    values, vectors = torch.linalg.eigh((projected + projected.T) / 2)
    order = values.argsort(descending=True)
    return values[order], vectors[:, order].T @ known


if __name__ == "__main__":
    main()
