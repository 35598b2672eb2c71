"""Operators of higher order against the programs that they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops import associative_scan, map, scan, while_loop
from torch.nn.attention.flex_attention import flex_attention

import jetplane as jp
from cases import F64, assert_quadratic, randn
from jetplane.testing.oracle import double_backward


def _three_times(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x * x.sin() + 0.5
    return x


def _heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.linspace(-1, 1, 128, dtype=F64).reshape(1, 2, 4, 16)
    return tuple(torch.sin(n * x[:, None] * wide) for n in (1.0, 2.0, 3.0))  # type: ignore[return-value]


def _flex(x: Tensor) -> Tensor:
    return flex_attention(*_heads(x), score_mod=lambda score, b, h, q, k: score * 2 + (q - k))


def _dense(x: Tensor) -> Tensor:
    far = torch.arange(4.0, dtype=F64)
    return F.scaled_dot_product_attention(*_heads(x), scale=0.5, attn_mask=far[:, None] - far)


def _flex_slopes(x: Tensor) -> Tensor:
    """A slope for each head, as ALiBi's, that the score looks up and that varies."""
    slopes = x[:2].exp()
    return flex_attention(*_heads(x), score_mod=lambda score, b, h, q, k: score + slopes[h] * (q - k))


def _dense_slopes(x: Tensor) -> Tensor:
    far = torch.arange(4.0, dtype=F64)
    query, key, value = _heads(x)
    scores = query @ key.mT / 4 + x[:2].exp()[:, None, None] * (far[:, None] - far)
    return scores.softmax(-1) @ value


PROGRAMS: list[tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    ("cond", lambda x: torch.cond(x.sum() < 1e9, lambda x: x.sin() * x, torch.cos, (x,)), lambda x: x.sin() * x),
    ("cond-other", lambda x: torch.cond(x.sum() > 1e9, torch.cos, lambda x: x**3, (x,)), lambda x: x**3),
    (
        "while_loop",
        lambda x: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * x.sin() + 0.5), (torch.tensor(0), x))[1],
        _three_times,
    ),
    ("scan", lambda x: scan(lambda c, a: (c * a + a, c.sin()), x.sum(), x)[1], lambda x: _scanned(x)),
    ("map", lambda x: map(lambda a: a.sin() * a, x), lambda x: x.sin() * x),
    (
        "associative_scan",
        lambda x: associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic"),
        lambda x: x.cumprod(0),
    ),
    ("flex_attention", _flex, _dense),
    ("flex_attention, slopes", _flex_slopes, _dense_slopes),
]


def _scanned(x: Tensor) -> Tensor:
    carried, made = x.sum(), []
    for a in x:
        made.append(carried.sin())
        carried = carried * a + a
    return torch.stack(made)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("graph", [False, True], ids=["plain", "graph"])
@pytest.mark.parametrize(("program", "twin"), [row[1:] for row in PROGRAMS], ids=[row[0] for row in PROGRAMS])
def test_they_are_the_programs_that_they_run(
    program: Callable[[Tensor], Tensor], twin: Callable[[Tensor], Tensor], graph: bool
) -> None:
    x, v = randn(4), randn(3, 4)
    leaf = x.clone().requires_grad_()
    expected = double_backward(lambda: twin(leaf).square().sum(), [leaf], [v])
    if graph and program in (_flex, _flex_slopes):  # torch has no such backward pass
        return
    if graph and program is PROGRAMS[3][1]:  # scan: torch makes another program of it
        with pytest.raises(jp.MissingRule, match="ScanAutogradOp has no rule"):
            jp.quadratic(lambda x: program(x).square().sum(), leaf, v)
        return
    assert_quadratic(jp.quadratic(lambda x: program(x).square().sum(), leaf if graph else x, v), expected)
    with jp.perturb([x], [v]) as jets:
        loss = program(x).square().sum()
    assert_quadratic(jets.quadratic(loss), expected)


class _Twice(torch._ops.HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("jetplane_twice")

    def __call__(self, f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return super().__call__(f, x)


def test_one_without_a_rule_says_so() -> None:
    twice = _Twice()
    twice.fallthrough(torch._C.DispatchKey.AutogradCPU)
    with pytest.raises(jp.MissingRule, match=r"jetplane_twice has no rule; called at"):
        jp.gradient(lambda x: twice(torch.sin, x).sum(), randn(3))


def test_the_compiler_that_a_pass_loads_compiles_nothing_of_it() -> None:
    # in a process of its own: torch.cond loads the compiler where it was not there before
    program = """
import torch, jetplane as jp
x = torch.ones(3)
found = jp.gradient(lambda x: torch.cond(x.sum() > 0, lambda x: (x * x).sum(), lambda x: x.sum(), (x,)), x)
assert torch.equal(found, 2 * x), found
assert torch.compile(lambda x: x + 1, backend="eager")(x).sum() == 6
assert torch._dynamo.eval_frame._stance.stance == "default"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
