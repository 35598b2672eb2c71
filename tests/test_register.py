"""Rules from outside: each family on an operation of one's own, and what a missing rule says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import jetplane as jp
from cases import F64, assert_quadratic, check_against_oracle, randn
from jetplane import register


@torch.library.custom_op("jptest::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


@torch.library.custom_op("jptest::power", mutates_args=())
def power(x: Tensor, n: int, scale: float = 1.0) -> Tensor:
    return scale * x**n


@torch.library.custom_op("jptest::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@torch.library.custom_op("jptest::mix", mutates_args=())
def mix(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    return a + weight * b


@torch.library.custom_op("jptest::outer", mutates_args=())
def outer(a: Tensor, b: Tensor) -> Tensor:
    return torch.outer(a, b)


@torch.library.custom_op("jptest::steps", mutates_args=())
def steps(x: Tensor) -> Tensor:
    return x.round()


@torch.library.custom_op("jptest::two", mutates_args=())
def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.cos()


@torch.library.custom_op("jptest::largest", mutates_args=())
def largest(x: Tensor) -> Tensor:
    return x.argmax()


@torch.library.custom_op("jptest::bump", mutates_args={"x"})
def bump(x: Tensor) -> None:
    x.add_(1)


# vmap must be able to lift the linear and the bilinear ones
doubled.register_vmap(lambda info, dims, x: (2 * x, dims[0]))
mix.register_vmap(
    lambda info, dims, a, b, w: (
        (a if dims[0] is not None else a[None]) + w * (b if dims[1] is not None else b[None]),
        0,
    )
)


@outer.register_vmap
def _(info, dims, a, b):
    a, b = (t if d is not None else t.expand(info.batch_size, *t.shape) for t, d in zip((a, b), dims, strict=True))
    return a[:, :, None] * b[:, None, :], 0


OPS = [
    getattr(torch.ops.jptest, name)
    for name in ("cube", "power", "doubled", "mix", "outer", "steps", "two", "largest", "bump")
]


@pytest.fixture(autouse=True)
def clean_table() -> Iterator[None]:
    yield
    for op in OPS:
        with contextlib.suppress(ValueError):
            register.remove(op)


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


def test_registering_twice_and_removing() -> None:
    register.constant(torch.ops.jptest.cube)
    with pytest.raises(
        ValueError, match=r"jptest.cube already has a rule of family 'constant'; expected one rule for each"
    ):
        register.constant(torch.ops.jptest.cube)
    register.remove(torch.ops.jptest.cube)
    with pytest.raises(ValueError, match=r"jptest.cube has no rule to remove"):
        register.remove(torch.ops.jptest.cube)
    with pytest.raises(jp.MissingRule):
        jp.gradient(lambda x: cube(x).sum(), randn(3))


def test_an_own_rule_cannot_replace_one_of_torch() -> None:
    with pytest.raises(ValueError, match=r"aten.tanh already has a rule of family 'elementwise'"):
        register.constant(torch.ops.aten.tanh)


def test_a_rule_of_an_overload_is_enough() -> None:
    register.elementwise(torch.ops.jptest.cube.default, lambda x, y: 3 * x**2, lambda x, y, d: 6 * x)
    try:
        check_against_oracle(lambda x: cube(x).sum(), randn(4), twin=lambda x: (x**3).sum())
    finally:
        register.remove(torch.ops.jptest.cube.default)


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return cube(x)  # the line that the message names


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), Inner())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_missing_rule_names_op_module_line_and_remedy() -> None:
    net = Outer()
    leaves = list(net.parameters())
    line = Inner.forward.__code__.co_firstlineno + 1
    with pytest.raises(jp.MissingRule) as caught, jp.perturb(leaves, [torch.ones(1, *p.shape) for p in leaves]):
        net(torch.ones(2, 3))
    message = str(caught.value)
    assert "jptest.cube.default has no rule" in message
    assert "layers.1 (Inner)" in message
    assert f"test_register.py:{line}" in message
    assert "jetplane.register" in message
    assert caught.value.op == "jptest.cube.default"
    assert isinstance(caught.value, NotImplementedError) and isinstance(caught.value, jp.JetplaneError)


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
