"""Minimisation for scipy's users: numpy in and out, exact curvature, and no derivatives to write (needs scipy)."""

from __future__ import annotations

import argparse

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

import jetplane as jp


def rosenbrock(x: Tensor) -> Tensor:
    """A PyTorch program; scipy.optimize.rosen is the same in numpy."""
    return ((1 - x[:-1]) ** 2 + 100 * (x[1:] - x[:-1] ** 2) ** 2).sum()


def main(argv: list[str] | None = None) -> None:
    """jetplane by itself, as a method of scipy's, and scipy's own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dimensions", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200, help="at most")
    arguments = parser.parse_args(argv)
    x0 = np.zeros(arguments.dimensions)

    ours = jp.minimize(rosenbrock, x0, maxiter=arguments.steps)
    options = {"method": "newton", "solver": "trust-region", "maxiter": arguments.steps}
    through = scipy.optimize.minimize(rosenbrock, x0, method=jp.minimize, options=options)
    theirs = scipy.optimize.minimize(scipy.optimize.rosen, x0, jac=scipy.optimize.rosen_der)
    for name, result in (("jp.minimize", ours), ("method=jp.minimize", through), ("scipy's BFGS", theirs)):
        print(f"{name:<20} fun {result.fun:.1e} after {result.nit} steps, |gradient| {np.abs(result.jac).max():.1e}")
        assert result.fun < 1e-8 and np.allclose(result.x, 1, atol=1e-3)
    assert isinstance(ours["x"], np.ndarray)

    fit = jp.minimize(lambda w, x, y: torch.nn.functional.mse_loss(x @ w, y), np.zeros(3), args=data())
    print(f"least squares: {np.round(fit.x, 3)}")
    assert np.allclose(fit.x, [1, -2, 3])


def data() -> tuple[Tensor, Tensor]:
    """Points of a linear function."""
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, x @ torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)


if __name__ == "__main__":
    main()
