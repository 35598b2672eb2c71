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


class Both(torch.autograd.Function):
    """Two results, for the transforms of torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * y, x.sin() * y

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return one * y + other * x.cos() * y, one * x + other * x.sin()


def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * y, x.sin() * y


@pytest.fixture
def functions() -> Iterator[None]:
    yield
    for function in (Cube, Body, Both):
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


vmap, grad = torch.func.vmap, torch.func.grad
TRANSFORMED = {
    "vmap": lambda f, x: sum(part.sin().sum() for part in vmap(f)(x, x.exp())),
    "vmap of one": lambda f, x: sum(part.sin().sum() for part in vmap(f, (0, None))(x, x[0].exp())),
    "vmap of vmap": lambda f, x: sum(p.sin().sum() for p in vmap(vmap(f, (0, None)), (None, 0))(x, x.exp())),
    "grad": lambda f, x: grad(lambda x: f(x, x)[1].sum())(x).square().sum(),
    "vmap of grad": lambda f, x: vmap(grad(lambda x: f(x, x)[1]))(x).square().sum(),
    "hessian": lambda f, x: torch.func.jacrev(grad(lambda x: f(x, x)[1].sum()))(x).square().sum(),
}


@pytest.mark.parametrize("transparent", [True, False])
@pytest.mark.parametrize("program", TRANSFORMED.values(), ids=TRANSFORMED)
def test_an_autograd_function_inside_a_transform_has_the_rule_of_itself(
    program, transparent: bool, functions: None
) -> None:
    x, v = randn(3), randn(2, 3)
    with pytest.raises(
        jp.MissingRule, match=r"Function Both has no rule, .* jetplane.register.composite\(Both, body\)"
    ):
        jp.quadratic(lambda x: program(Both.apply, x), x, v)
    register.transparent(Both) if transparent else register.composite(Both, both)
    check_against_oracle(lambda x: program(Both.apply, x), x, twin=lambda x: program(both, x))


def test_transparent_in_a_module_under_perturb(functions: None) -> None:
    register.transparent(Body)
    x, v = randn(4), randn(2, 4)
    with jp.perturb([x], [v]) as jets:
        loss = Body.apply(x * 2).sum()
    assert_quadratic(jets.quadratic(loss), jp.quadratic(lambda x: ((x * 2).sin() * 2).sum(), x, v))
    assert loss.dtype == F64
