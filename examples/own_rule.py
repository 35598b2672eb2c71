"""An operation of one's own: jetplane refuses it by name, then it is given a rule, and its derivatives are exact."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import jetplane as jp


@torch.library.custom_op("jetplane_examples::softsign_square", mutates_args=())
def softsign_square(x: Tensor) -> Tensor:
    """x^2 / (1 + x^2), in place of a kernel of one's own that torch knows nothing of."""
    return x * x / (1 + x * x)


def main(argv: list[str] | None = None) -> None:
    """MissingRule, a rule, and a check against finite differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args(argv).steps
    operation = torch.ops.jetplane_examples.softsign_square.default

    x = torch.linspace(-2, 2, 9, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return softsign_square(x).sum()

    try:
        jp.hessian(f, x)
    except jp.MissingRule as error:
        print(f"without a rule: {str(error).splitlines()[0]}")
    else:
        raise AssertionError("expected MissingRule")

    # y' from x and y, and y'' from x, y and y': a line each
    jp.register.elementwise(
        operation, lambda x, y: 2 * x / (1 + x * x) ** 2, lambda x, y, d: (2 - 6 * x * x) / (1 + x * x) ** 3
    )
    try:
        assert jp.verify(f, x).ok  # slopes and curvatures against finite differences
        torch.testing.assert_close(jp.gradient(f, x), 2 * x / (1 + x * x) ** 2)
        torch.testing.assert_close(jp.hessian(f, x).diagonal(), (2 - 6 * x * x) / (1 + x * x) ** 3)
        result = jp.minimize(f, [0.4, -0.3], maxiter=steps)
        print(f"with the rule: exact, and minimised to {result.fun:.1e} in {result.nit} steps")
        assert result.fun < 1e-8
    finally:
        jp.register.remove(operation)  # a program would leave it: the rule is global


if __name__ == "__main__":
    main()
