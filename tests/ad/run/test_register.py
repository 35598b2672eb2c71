"""Rules from outside: what an operation without one may do, and rules for autograd functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import jetplane as jp
from cases import F64, assert_quadratic, check_against_oracle, randn
from jetplane import register
from own_operations import bump, cube, largest

pytestmark = pytest.mark.usefixtures("clean_table")


def test_an_op_without_a_rule_is_fine_where_nothing_varies_or_no_derivative_exists() -> None:
    x, c = randn(3), randn(3)
    check_against_oracle(lambda x: (cube(c) * x**2).sum(), x)
    check_against_oracle(lambda x: x[largest(x)] ** 2, x)


def test_an_op_that_writes_without_a_rule_is_refused() -> None:
    def program(x: Tensor) -> Tensor:
        y = x * 2
        bump(y)
        return y.sum()

    with pytest.raises(jp.MissingRule, match=r"jptest.bump.default has no rule"):
        jp.gradient(program, randn(3))


class Cube(torch.autograd.Function):
    """A Function whose backward is the truth, and whose forward body hides it."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.detach() ** 3

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


class Body(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.sin() * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise AssertionError


@pytest.fixture
def functions() -> Iterator[None]:
    yield
    for function in (Cube, Body):
        with contextlib.suppress(ValueError):
            register.remove(function)


def test_autograd_function_as_composite(functions: None) -> None:
    register.composite(Cube, lambda x: x**3)
    check_against_oracle(lambda x: Cube.apply(x.sin()).sum(), randn(4), twin=lambda x: (x.sin() ** 3).sum())


def test_autograd_function_as_transparent(functions: None) -> None:
    register.transparent(Body)
    check_against_oracle(lambda x: Body.apply(x).square().sum(), randn(4), twin=lambda x: (x.sin() * 2).square().sum())


def test_autograd_function_as_constant(functions: None) -> None:
    register.constant(Body)
    x = randn(4)
    c = x.sin() * 2
    check_against_oracle(lambda x: (Body.apply(x) * x.exp()).sum(), x, twin=lambda x: (c * x.exp()).sum())


def test_transparent_in_a_module_under_perturb(functions: None) -> None:
    register.transparent(Body)
    x, v = randn(4), randn(2, 4)
    with jp.perturb([x], [v]) as jets:
        loss = Body.apply(x * 2).sum()
    assert_quadratic(jets.quadratic(loss), jp.quadratic(lambda x: ((x * 2).sin() * 2).sum(), x, v))
    assert loss.dtype == F64
