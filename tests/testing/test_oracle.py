"""Double backward against closed forms and differences: the reference itself has to be right."""

from __future__ import annotations

import torch
from torch import nn

from cases import assert_close, randn
from jetplane.testing.oracle import double_backward


def test_a_quadratic_form_has_its_own_matrix() -> None:
    a, b = randn(4, 4), randn(4)
    x, v = randn(4).requires_grad_(), randn(3, 4)
    found = double_backward(lambda: 0.5 * x @ a @ x + b @ x, [x], [v])
    symmetric, point = 0.5 * (a + a.T), x.detach()
    assert_close(found.loss, 0.5 * point @ a @ point + b @ point)
    assert_close(found.slope, v @ (symmetric @ point + b))
    assert_close(found.curvature, v @ symmetric @ v.T)


def test_a_network_agrees_with_differences() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), randn(5, 3)
    leaves = list(model.parameters())
    v = [randn(2, *leaf.shape) for leaf in leaves]

    def at(s: float, t: float) -> float:
        moved = [p.detach() + s * d[0] + t * d[1] for p, d in zip(leaves, v, strict=True)]
        named = dict(zip(dict(model.named_parameters()), moved, strict=True))
        return float(torch.func.functional_call(model, named, (x,)).square().mean())

    found, h = double_backward(lambda: model(x).square().mean(), leaves, v), 1e-4
    assert abs(float(found.slope[0]) - (at(h, 0) - at(-h, 0)) / (2 * h)) < 1e-5 * (1 + abs(float(found.slope[0])))
    mixed = (at(h, h) - at(h, -h) - at(-h, h) + at(-h, -h)) / (4 * h * h)
    assert abs(float(found.curvature[0, 1]) - mixed) < 1e-4 * (1 + abs(mixed))
    assert_close(found.curvature, found.curvature.T)


def test_what_does_not_vary_and_what_is_linear() -> None:
    x, unused, v = randn(3).requires_grad_(), randn(2).requires_grad_(), [randn(2, 3), randn(2, 2)]
    constant = double_backward(lambda: torch.ones((), dtype=torch.float64), [x, unused], v)
    assert not constant.slope.any() and not constant.curvature.any()
    linear = double_backward(lambda: x.sum(), [x, unused], v)
    assert_close(linear.slope, v[0].sum(1))
    assert not linear.curvature.any()
