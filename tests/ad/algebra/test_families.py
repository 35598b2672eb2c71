"""The families of rules, each with an operation of one's own."""

from __future__ import annotations

import pytest
import torch

import jetplane as jp
from cases import check_against_oracle, randn
from jetplane import register
from own_operations import cube, doubled, mix, outer, power, steps, two

pytestmark = pytest.mark.usefixtures("clean_table")


def test_elementwise() -> None:
    register.elementwise(torch.ops.jptest.cube, lambda x, y: 3 * x**2, lambda x, y, d: 6 * x)
    check_against_oracle(lambda x: cube(x.sin()).sum(), randn(4), twin=lambda x: (x.sin() ** 3).sum())


def test_elementwise_with_further_arguments() -> None:
    register.elementwise(
        torch.ops.jptest.power,
        lambda x, y, n, scale=1.0: scale * n * x ** (n - 1),
        lambda x, y, d, n, scale=1.0: scale * n * (n - 1) * x ** (n - 2),
    )
    check_against_oracle(lambda x: power(x, 4, 0.5).sum(), randn(4), twin=lambda x: (0.5 * x**4).sum())
    check_against_oracle(lambda x: power(x, 3).sum(), randn(4), twin=lambda x: (x**3).sum())


def test_linear() -> None:
    register.linear(torch.ops.jptest.doubled)
    check_against_oracle(
        lambda x: doubled(x.sin()).square().sum(), randn(4), twin=lambda x: (2 * x.sin()).square().sum()
    )


def test_linear_in_several_arguments() -> None:
    register.linear(torch.ops.jptest.mix, over=("a", "b"))
    w = randn(4)
    check_against_oracle(
        lambda x: mix(x.sin(), x, w).square().sum(), randn(4), twin=lambda x: (x.sin() + w * x).square().sum()
    )
    with pytest.raises(jp.MissingRule, match=r"jptest.mix.*does not differentiate its argument 'weight'"):
        jp.gradient(lambda x: mix(w, w, x).sum(), w)


def test_bilinear() -> None:
    register.bilinear(torch.ops.jptest.outer)
    check_against_oracle(
        lambda x: outer(x.sin(), x).square().sum(), randn(4), twin=lambda x: torch.outer(x.sin(), x).square().sum()
    )
    check_against_oracle(
        lambda x: outer(x, torch.ones_like(x)).sin().sum(),
        randn(4),
        twin=lambda x: torch.outer(x, torch.ones_like(x)).sin().sum(),
    )


def test_constant() -> None:
    register.constant(torch.ops.jptest.steps)
    check_against_oracle(lambda x: (steps(x) * x.sin()).sum(), randn(4), twin=lambda x: (x.round() * x.sin()).sum())


def test_composite() -> None:
    register.composite(torch.ops.jptest.two, lambda x: (torch.sin(x), torch.cos(x)))
    check_against_oracle(lambda x: (two(x)[0] * two(x)[1]).sum(), randn(4), twin=lambda x: (x.sin() * x.cos()).sum())


def test_jet() -> None:
    def rule(pairs, op, x):
        y = op(x.primal)
        tangent = None if x.tangent is None else 3 * x.primal**2 * x.tangent
        second = None
        if pairs.rows:
            second = 6 * x.primal * pairs.outer(x.tangent, x.tangent)
            second = second if x.second is None else second + 3 * x.primal**2 * x.second
        return type(x)(y, tangent, second)

    register.jet(torch.ops.jptest.cube, rule)
    check_against_oracle(lambda x: cube(x.sin()).sum(), randn(4), twin=lambda x: (x.sin() ** 3).sum())
