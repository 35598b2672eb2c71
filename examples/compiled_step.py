"""A whole optimizer step as one compiled graph: directions, jets, solution of the plane and update.

The first step compiles and is checked against the step as it is. Needs a C++ compiler on the CPU.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.nn import functional

import jetplane as jp


def main(argv: list[str] | None = None) -> None:
    """The same steps eagerly and compiled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args(argv).steps

    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(steps, 32, 4, generator=generator, dtype=torch.float64)
    ys = xs[:, :, :3].argmax(-1)

    def train(compiled: bool) -> Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3).double()
        optimizer = jp.optim.FoMoH(model.parameters(), lr=0.5, compile=compiled)
        reports = optimizer.steps(lambda x, y: functional.cross_entropy(model(x), y), xs, ys)  # all steps, one call
        return torch.stack([*reports.loss, *model.weight.detach().flatten()])

    eager, compiled = train(False), train(True)
    print(f"loss {float(eager[0]):.3f} at first, {float(eager[steps - 1]):.3f} after {steps} steps")
    print(f"largest difference between compiled and not: {float((eager - compiled).abs().max()):.1e}")
    torch.testing.assert_close(eager, compiled)


if __name__ == "__main__":
    main()
