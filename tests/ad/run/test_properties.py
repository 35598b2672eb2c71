"""Random programs: a small grammar of operations, its jets against double backward, and what must not change them.

A program is a list of steps, each an operation with two operands picked from the values so far and a few integers
(axes, offsets). Every choice is taken modulo what fits, so each list of integers is a valid program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor
from torch.nn import functional as F

import jetplane as jp
from jetplane import PairSet, Quadratic
from jetplane.testing.oracle import double_backward

MAX_ELEMENTS = 64  # larger values are summed along an axis before the next step


def examples(count: int) -> Callable[..., Any]:
    """The same programs in every run, without a time limit for each."""
    return settings(max_examples=count, derandomize=True, database=None, deadline=None)


# -- the grammar --------------------------------------------------------------------------------------------------

Step = Callable[[Tensor, Tensor, int, int], Tensor]


def _axis(x: Tensor, choice: int) -> int:
    axis = choice % x.ndim
    return axis if choice % 2 else axis - x.ndim  # counted from either end


def _partner(x: Tensor, y: Tensor) -> Tensor:
    """``y`` where it broadcasts with ``x``, else its sum."""
    try:
        torch.broadcast_shapes(x.shape, y.shape)
    except RuntimeError:
        return y.sum()
    return y


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "relu": torch.relu,
    "leaky_relu": F.leaky_relu,
    "erf": torch.erf,
    "atan": torch.atan,
    "asinh": torch.asinh,
    "abs": torch.abs,
    "bell": lambda x: (-(x**2)).exp(),
    "expm1": lambda x: torch.expm1(x.tanh()),
    "log1p": lambda x: torch.log1p(x * x),
    "sqrt": lambda x: (1 + x**2).sqrt(),
    "rsqrt": lambda x: (2 + x.cos()).rsqrt(),
    "reciprocal": lambda x: 1 / (1 + x**2),
    "log": lambda x: (1.5 + x.sin()).log(),
    "logsigmoid": F.logsigmoid,
    "pow 3": lambda x: x.tanh() ** 3,
    "pow 0.5": lambda x: (1 + x.sigmoid()) ** 0.5,
    "2 ** x": lambda x: 2 ** x.tanh(),
    "clamp": lambda x: x.clamp(-0.8, 0.9),
    "negative": torch.neg,
    "scaled": lambda x: 0.5 * x - 1,
    "detached": lambda x: x * x.detach(),
}

BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub alpha": lambda x, y: torch.sub(x, y, alpha=0.5),
    "mul": torch.mul,
    "div": lambda x, y: x / (1 + y * y),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "where both": lambda x, y: torch.where(x > y, x * y, y.sin()),
    "hypot": lambda x, y: torch.hypot(x.cosh(), y),
    "atan2": lambda x, y: torch.atan2(x, 1 + y * y),
    "logaddexp": torch.logaddexp,
    "pow": lambda x, y: (1 + x.tanh() ** 2) ** y.tanh(),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp tensor": lambda x, y: torch.lerp(x, y, x.sigmoid()),
    "addcmul": lambda x, y: torch.addcmul(x, y, x, value=0.5),
    "xlogy": lambda x, y: torch.xlogy(x, 1 + y * y),
}


def _spread(x: Tensor, axis: int, keepdim: bool) -> Tensor:
    return x.var(axis, correction=0, keepdim=keepdim) if x.shape[axis] else x.sum(axis, keepdim=keepdim)


def _largest(x: Tensor, axis: int, keepdim: bool) -> Tensor:
    return x.amax(axis, keepdim=keepdim) if x.shape[axis] else x.sum(axis, keepdim=keepdim)


def _picked(x: Tensor, axis: int, keepdim: bool) -> Tensor:
    return x.max(axis, keepdim=keepdim).values if x.shape[axis] else x.sum(axis, keepdim=keepdim)


def _soft(x: Tensor, axis: int, keepdim: bool) -> Tensor:
    return x.logsumexp(axis, keepdim=keepdim) if x.shape[axis] else x.sum(axis, keepdim=keepdim)


def _mean(x: Tensor, axis: int, keepdim: bool) -> Tensor:
    return x.mean(axis, keepdim=keepdim) if x.shape[axis] else x.sum(axis, keepdim=keepdim)


REDUCTION: dict[str, Callable[[Tensor, int, bool], Tensor]] = {
    "sum": lambda x, axis, keepdim: x.sum(axis, keepdim=keepdim),
    "mean": _mean,
    "prod": lambda x, axis, keepdim: x.tanh().prod(axis, keepdim=keepdim),
    "var": _spread,
    "amax": _largest,
    "max": _picked,
    "logsumexp": _soft,
    "norm": lambda x, axis, keepdim: torch.linalg.vector_norm(1 + x * x, dim=axis, keepdim=keepdim),
}

ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cumsum": lambda x, axis: x.cumsum(axis),
    "cumprod": lambda x, axis: x.tanh().cumprod(axis),
    "softmax": lambda x, axis: x.softmax(axis),
    "log_softmax": lambda x, axis: x.log_softmax(axis),
    "flip": lambda x, axis: x.flip(axis),
    "roll": lambda x, axis: x.roll(1, axis),
    "sort": lambda x, axis: x.sort(axis).values,
    "unsqueeze": lambda x, axis: x.unsqueeze(axis),
    "squeeze": lambda x, axis: x.squeeze(axis),
    "tail": lambda x, axis: x.narrow(axis, min(1, x.shape[axis]), max(x.shape[axis] - 1, 0)),
    "every other": lambda x, axis: x.transpose(0, axis)[::2],
    "movedim": lambda x, axis: x.movedim(axis, 0),
    "flatten": lambda x, axis: x.flatten(),
    "reshape": lambda x, axis: x.transpose(0, axis).reshape(x.shape[axis], -1) if x.numel() else x,
    "diff": lambda x, axis: x.diff(dim=axis) if x.shape[axis] else x,
    "repeat": lambda x, axis: x.repeat_interleave(2, axis),
    "pad": lambda x, axis: F.pad(x, (1, 1)),
    "split": lambda x, axis: x.split(1, axis)[-1] if x.shape[axis] else x,
    "cat": lambda x, axis: torch.cat([x, x.sin(), x.detach()], axis),
    "stack": lambda x, axis: torch.stack([x, x.cos()], axis),
}


def _rows(x: Tensor, choice: int) -> Tensor:
    """Integer indexing with a repeated row."""
    count = x.shape[0]
    return x[torch.tensor([choice % count, 0, count - 1])] if count else x


def _masked(x: Tensor, choice: int) -> Tensor:
    return x[x > 0.1 * (choice % 3)]


def _gathered(x: Tensor, choice: int) -> Tensor:
    axis = _axis(x, choice)
    return x.gather(axis, torch.zeros_like(x, dtype=torch.long)) if x.numel() else x


INDEX: dict[str, Callable[[Tensor, int], Tensor]] = {
    "rows": _rows,
    "mask": _masked,
    "gather": _gathered,
    "ellipsis": lambda x, choice: x[..., None, choice % 2 :],
    "last": lambda x, choice: x[-1] if x.shape[0] else x,
    "tril": lambda x, choice: x.tril(choice % 2) if x.ndim > 1 else x,
    "expand": lambda x, choice: x.unsqueeze(0).expand(1 + choice % 2, *x.shape),
}


def _gram(x: Tensor, y: Tensor) -> Tensor:
    return x @ x.mT if x.ndim > 1 else torch.atleast_1d(x) @ torch.atleast_1d(x)


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return torch.outer(x.flatten()[:4], y.flatten()[:4])


def _linear(x: Tensor, y: Tensor) -> Tensor:
    if not x.ndim or not y.numel():
        return x.sum() * y.sum()
    return F.linear(x, y.flatten()[0] * torch.ones(2, x.shape[-1], dtype=x.dtype), y.flatten()[-1].expand(2))


def _contract(x: Tensor, y: Tensor) -> Tensor:
    n = min(x.numel(), y.numel(), 4)
    return torch.einsum("i,j,ij->j", x.flatten()[:n], y.flatten()[:n], torch.outer(y.flatten()[:n], x.flatten()[:n]))


PRODUCT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gram": _gram,
    "outer": _outer,
    "linear": _linear,
    "einsum": _contract,
    "dot": lambda x, y: x.flatten() @ x.sin().flatten(),
    "mv": lambda x, y: _outer(x, y) @ y.flatten()[:4],
}


def _write_row(x: Tensor, y: Tensor) -> Tensor:
    buffer = torch.zeros((2, *x.shape), dtype=x.dtype)
    buffer[1] = x.tanh()
    buffer[0] += y.sum()
    return buffer


def _write_through_views(x: Tensor, y: Tensor) -> Tensor:
    buffer = x.clone()
    flat = buffer.view(-1)
    flat[: len(flat) // 2].mul_(y.sum().sin())
    buffer.sub_(0.5)
    flat[-1:] = 2 * flat[:1]
    return buffer * flat.sum()


def _in_place_chain(x: Tensor, y: Tensor) -> Tensor:
    buffer = x * 1
    before = buffer.sum()
    buffer.sin_().add_(x, alpha=0.5).clamp_(min=-0.7)
    return buffer * before


def _write_transposed(x: Tensor, y: Tensor) -> Tensor:
    buffer = torch.ones((*x.shape, 2), dtype=x.dtype)
    buffer.movedim(-1, 0)[0].copy_(x)
    buffer.movedim(-1, 0)[1].mul_(_partner(x, y) if (x + _partner(x, y)).shape == x.shape else y.sum())
    return buffer


def _masked_fill(x: Tensor, y: Tensor) -> Tensor:
    return (x * 1).masked_fill_(x > 0, 0.25) + x.masked_fill(x < 0, 1.0)


def _index_add(x: Tensor, y: Tensor) -> Tensor:
    buffer = torch.zeros(3, dtype=x.dtype)
    index = torch.arange(x.numel()) % 3
    buffer.index_add_(0, index, x.flatten())
    return buffer.index_put((index[:1],), x.flatten()[:1] ** 2, accumulate=True)


def _erased(x: Tensor, y: Tensor) -> Tensor:
    """A buffer that depended on ``x`` and then does so no more."""
    buffer = x * 1
    before = buffer.sum()
    buffer.zero_()
    return before * buffer.cos().softmax(-1) + buffer.relu().square().to(torch.float32) + y.sum()


WRITE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "erased": _erased,
    "row": _write_row,
    "views": _write_through_views,
    "chain": _in_place_chain,
    "transposed": _write_transposed,
    "masked_fill": _masked_fill,
    "index_add": _index_add,
}


def _unary(name: str) -> Step:
    return lambda x, y, a, b: UNARY[name](x)


def _binary(name: str) -> Step:
    return lambda x, y, a, b: BINARY[name](x, _partner(x, y))


def _reduction(name: str) -> Step:
    return lambda x, y, a, b: REDUCTION[name](x, _axis(x, a), bool(b % 2)) if x.ndim else x


def _along(name: str) -> Step:
    return lambda x, y, a, b: ALONG[name](x, _axis(x, a)) if x.ndim else x


def _index(name: str) -> Step:
    return lambda x, y, a, b: INDEX[name](x, a) if x.ndim else x


def _both(table: dict[str, Callable[[Tensor, Tensor], Tensor]], name: str) -> Step:
    return lambda x, y, a, b: table[name](x, y)


STEPS: dict[str, Step] = {
    **{f"unary {name}": _unary(name) for name in UNARY},
    **{f"binary {name}": _binary(name) for name in BINARY},
    **{f"reduce {name}": _reduction(name) for name in REDUCTION},
    **{f"along {name}": _along(name) for name in ALONG},
    **{f"index {name}": _index(name) for name in INDEX},
    **{f"product {name}": _both(PRODUCT, name) for name in PRODUCT},
    **{f"write {name}": _both(WRITE, name) for name in WRITE},
}


# -- programs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """Leaves and the steps that follow; calling it gives a scalar."""

    shapes: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[str, int, int, int, int], ...]  # name, two operands, two choices
    seed: int

    def leaves(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(self.seed)
        return tuple(torch.randn(shape, dtype=torch.float64, generator=generator) for shape in self.shapes)

    def directions(self, k: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return tuple(torch.randn((k, *shape), dtype=torch.float64, generator=generator) for shape in self.shapes)

    def values(self, *leaves: Tensor) -> list[Tensor]:
        values = list(leaves)
        for name, left, right, a, b in self.steps:
            # mostly the newest value, so that programs are deep
            x = values[-1] if left % 3 else values[left % len(values)]
            out = STEPS[name](x, values[right % len(values)], a, b)
            while out.numel() > MAX_ELEMENTS:
                out = out.sum(0)
            values.append(out)
        return values

    def __call__(self, *leaves: Tensor) -> Tensor:
        """A weighted sum of the last value, and a little of every leaf so that each one is used."""
        values = self.values(*leaves)
        last = values[-1]
        weights = torch.linspace(-1, 2, last.numel(), dtype=last.dtype).reshape(last.shape)
        return (weights * last).sum() + sum(0.1 * leaf.sum() for leaf in leaves)


sizes = st.sampled_from([0, 1, 1, 2, 3])


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Up to three shapes that broadcast with each other."""
    full = draw(st.lists(sizes, max_size=3))
    found = [tuple(full)]
    for _ in range(draw(st.integers(0, 2))):
        dropped = draw(st.integers(0, len(full)))
        ones = draw(st.lists(st.booleans(), min_size=len(full), max_size=len(full)))
        found.append(tuple(1 if one else n for n, one in zip(full, ones, strict=True))[dropped:])
    return tuple(found)


numbers = st.integers(0, 11)
programs = st.builds(
    Program,
    shapes=shapes(),
    steps=st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), numbers, numbers, numbers, numbers), min_size=1, max_size=6
    ).map(tuple),
    seed=st.integers(0, 1000),
)
counts = st.integers(1, 8)


def oracle(program: Program, k: int) -> Quadratic:
    leaves = [leaf.requires_grad_() for leaf in program.leaves()]
    return double_backward(lambda: program(*leaves), leaves, program.directions(k))


def is_moderate(model: Quadratic) -> bool:
    """Whether the numbers are small enough to compare; those that overflow or leave the domain say nothing."""
    return all(float(part.abs().max()) < 1e8 for part in (model.loss, model.slope, model.curvature))


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


def close_quadratics(actual: Quadratic, expected: Quadratic, tolerance: float = 1e-9) -> None:
    close(actual.loss, expected.loss, tolerance)
    close(actual.slope, expected.slope, tolerance)
    close(actual.curvature, expected.curvature, tolerance)


# -- the properties -----------------------------------------------------------------------------------------------


@examples(300)
@given(program=programs, k=counts)
def test_jets_equal_double_backward(program: Program, k: int) -> None:
    expected = oracle(program, k)
    assume(is_moderate(expected))
    actual = jp.quadratic(program, program.leaves(), program.directions(k))
    close_quadratics(actual, expected)
    assert torch.equal(actual.curvature, actual.curvature.mT)


@pytest.mark.parametrize("name", sorted(STEPS))
def test_every_step_between_curved_ones(name: str) -> None:
    for shape in ((), (3,), (1, 2), (2, 0), (2, 3, 1)):
        program = Program((shape, (1,)), (("unary sin", 0, 0, 0, 0), (name, 1, 1, 3, 1), ("unary tanh", 1, 1, 0, 0)), 7)
        close_quadratics(jp.quadratic(program, program.leaves(), program.directions(3)), oracle(program, 3))


@examples(60)
@given(program=programs, k=counts, rows=st.integers(1, 4))
def test_linear_maps_of_the_directions(program: Program, k: int, rows: int) -> None:
    # V -> A V gives A g and A H A^T
    generator = torch.Generator().manual_seed(program.seed + 2)
    mix = torch.randn((rows, k), dtype=torch.float64, generator=generator)
    directions = program.directions(k)
    before = jp.quadratic(program, program.leaves(), directions)
    assume(is_moderate(before))
    after = jp.quadratic(program, program.leaves(), tuple(torch.tensordot(mix, d, dims=1) for d in directions))
    close(after.loss, before.loss)
    close(after.slope, mix @ before.slope)
    close(after.curvature, mix @ before.curvature @ mix.mT)


@examples(60)
@given(program=programs, k=counts, chunk_size=st.integers(1, 9))
def test_chunks_give_the_same(program: Program, k: int, chunk_size: int) -> None:
    leaves, directions = program.leaves(), program.directions(k)
    whole = jp.quadratic(program, leaves, directions)
    assume(is_moderate(whole))
    close_quadratics(jp.quadratic(program, leaves, directions, chunk_size=chunk_size), whole, 1e-12)
    for pairs in ("diagonal", "star", "laplacian", "none"):
        chunked = jp.jet(program, leaves, directions, pairs, chunk_size=chunk_size)
        unchunked = jp.jet(program, leaves, directions, pairs)
        close(chunked.tangent, unchunked.tangent, 1e-12)
        close(chunked.second, unchunked.second, 1e-12)


@examples(60)
@given(program=programs, k=counts, data=st.data())
def test_pair_sets_agree_with_the_full_matrix(program: Program, k: int, data: st.DataObject) -> None:
    leaves, directions = program.leaves(), program.directions(k)
    full = jp.quadratic(program, leaves, directions).curvature
    assume(bool(full.isfinite().all()))

    def second(pairs: str | PairSet) -> Tensor:
        return jp.jet(program, leaves, directions, pairs).second

    close(second("diagonal"), full.diagonal(), 1e-12)
    close(second("star"), full[0, 1:], 1e-12)
    close(second("laplacian"), full.trace().reshape(1), 1e-11)
    index = st.integers(0, k - 1)
    chosen = data.draw(st.lists(st.tuples(index, index), min_size=1, max_size=5))
    close(second(PairSet(k, tuple(chosen))), torch.stack([full[i, j] for i, j in chosen]), 1e-12)
    weights = tuple(
        float(w) for w in data.draw(st.lists(st.integers(-3, 3), min_size=len(chosen), max_size=len(chosen)))
    )
    weighted = sum(w * full[i, j] for w, (i, j) in zip(weights, chosen, strict=True))
    close(second(PairSet(k, tuple(chosen), weights)), torch.as_tensor(weighted).reshape(1), 1e-11)


@pytest.mark.parametrize("name", sorted(STEPS))
def test_the_layout_of_the_directions_does_not_matter(name: str) -> None:
    for shape in ((3,), (2, 3)):
        program = Program((shape, (1,)), ((name, 0, 1, 3, 1), ("unary sin", 1, 1, 0, 0)), 3)
        leaves, directions = program.leaves(), program.directions(3)
        expected = jp.quadratic(program, leaves, directions)
        # rows as the last axis in memory, as torch.linalg.qr and a transpose give them
        turned = tuple(d.movedim(0, -1).contiguous().movedim(-1, 0) for d in directions)
        close_quadratics(jp.quadratic(program, leaves, turned), expected, 1e-12)
        strided = tuple(torch.stack([d, d], -1)[..., 0] for d in directions)
        close_quadratics(jp.quadratic(program, leaves, strided), expected, 1e-12)


@examples(40)
@given(first=programs, second=programs, k=counts)
def test_quadratics_add_up(first: Program, second: Program, k: int) -> None:
    # two losses on the same leaves, apart and together
    second = Program(first.shapes, second.steps, first.seed)
    leaves, directions = first.leaves(), first.directions(k)
    together = jp.quadratic(lambda *leaves: first(*leaves) + 2 * second(*leaves), leaves, directions)
    assume(is_moderate(together))
    apart = jp.quadratic(first, leaves, directions) + 2 * jp.quadratic(second, leaves, directions)
    assume(is_moderate(apart))
    close_quadratics(apart, together)
    close_quadratics(sum([together, together]) / 2, together, 1e-12)


@examples(40)
@given(program=programs, k=counts)
def test_the_context_equals_the_function(program: Program, k: int) -> None:
    leaves, directions = program.leaves(), program.directions(k)
    expected = jp.quadratic(program, leaves, directions)
    assume(is_moderate(expected))
    with jp.perturb(leaves, directions) as jets:
        loss = program(*leaves)
    close_quadratics(jets.quadratic(loss), expected, 1e-12)


@examples(40)
@given(program=programs)
def test_jets_of_values_of_any_shape(program: Program) -> None:
    # all intermediate values: tangents by double backward's first half, rows of the shape promised
    leaves, directions = program.leaves(), program.directions(2)
    jet = jp.jet(program.values, leaves, directions)
    tracked = [leaf.requires_grad_() for leaf in program.leaves()]
    with torch.enable_grad():
        values = program.values(*tracked)
    for value, tangent, second in zip(values, jet.tangent, jet.second, strict=True):
        assert tangent.shape == (2, *value.shape)
        assert second.shape == (3, *value.shape)
        assume(value.numel() == 0 or float(value.detach().abs().max()) < 1e6)
        probe = torch.linspace(1, 2, value.numel(), dtype=value.dtype).reshape(value.shape)
        gradients = torch.autograd.grad((value * probe).sum(), tracked, retain_graph=True, allow_unused=True)
        for row in range(2):
            terms = [(g * d[row]).sum() for g, d in zip(gradients, directions, strict=True) if g is not None]
            close((tangent[row] * probe).sum(), sum(terms, torch.zeros((), dtype=torch.float64)))


@examples(30)
@given(program=programs)
def test_hyperduals_are_symmetric_and_bend(program: Program) -> None:
    leaves, directions = program.leaves(), program.directions(3)
    v1, v2, v12 = (tuple(d[i] for d in directions) for i in range(3))
    number, swapped = jp.hyperdual(program, leaves, v1, v2, v12), jp.hyperdual(program, leaves, v2, v1, v12)
    model = jp.quadratic(program, leaves, directions)
    assume(is_moderate(model))
    close(number.eps1, model.slope[0])
    close(number.eps2, model.slope[1])
    close(number.eps12, model.slope[2] + model.curvature[0, 1])
    close(swapped.eps12, number.eps12, 1e-12)
