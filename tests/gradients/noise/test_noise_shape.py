"""The shape of noise, and its inverse: E[undo(u) apply(u)^T] = 1 where noise enters, over all signs there are."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from jetplane.gradients.noise.noise_shape import NoiseShape
from jetplane.gradients.plan.own_weights import OwnWeights
from jetplane.gradients.program.done import Done

TOKENS, WIDTH = 2, 3
FACTORS = st.floats(0.01, 100.0)


def signs(*shape: int) -> Tensor:
    """All rows of signs that there are, (2^n, *S)."""
    size = torch.Size(shape).numel()
    return torch.tensor(list(product([1.0, -1.0], repeat=size)), dtype=torch.float64).reshape(-1, *shape)


def numbers(*shape: int) -> st.SearchStrategy[Tensor]:
    size = torch.Size(shape).numel()
    return st.lists(FACTORS, min_size=size, max_size=size).map(
        lambda found: torch.tensor(found, dtype=torch.float64).reshape(shape)
    )


def masks(*shape: int) -> st.SearchStrategy[Tensor]:
    size = torch.Size(shape).numel()
    return st.lists(st.booleans(), min_size=size, max_size=size).map(lambda found: torch.tensor(found).reshape(shape))


SHAPES = st.builds(
    NoiseShape,
    st.none() | numbers(),
    st.none() | numbers(TOKENS, 1),
    st.none() | masks(TOKENS, 1) | masks(TOKENS, WIDTH),
    st.none() | masks(TOKENS, WIDTH),
)


def enters(shape: NoiseShape) -> Tensor:
    """Where noise enters, of truth values (tokens, width)."""
    everywhere = torch.ones(TOKENS, WIDTH, dtype=torch.bool)
    for mask in (shape.live, shape.alive):
        everywhere = everywhere if mask is None else everywhere & mask
    return everywhere


@settings(deadline=None)
@given(SHAPES)
def test_what_is_undone_is_unbiased_over_all_signs(shape: NoiseShape) -> None:
    white = signs(TOKENS, WIDTH)
    mean = shape.undo(white).flatten(1).T @ shape.apply(white).flatten(1) / len(white)
    torch.testing.assert_close(mean, torch.diag(enters(shape).flatten().double()), rtol=0, atol=1e-11)


@settings(deadline=None)
@given(SHAPES, numbers(TOKENS, WIDTH))
def test_the_estimate_of_a_derivative_is_exact_over_all_signs(shape: NoiseShape, slope: Tensor) -> None:
    """As the passes use it: scalars of what entered, times the white noise, undone once at the end."""
    white = signs(TOKENS, WIDTH)
    scalars = (shape.apply(white) * slope).sum((1, 2)) / len(white)
    found = shape.undo((scalars.reshape(-1, 1, 1) * white).sum(0))
    torch.testing.assert_close(found, slope * enters(shape), rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(SHAPES, numbers(TOKENS, WIDTH), numbers(TOKENS, WIDTH))
def test_what_is_known_is_added_as_it_is_where_losses_depend_on_it(
    shape: NoiseShape, found: Tensor, known: Tensor
) -> None:
    live = torch.ones(TOKENS, WIDTH, dtype=torch.bool) if shape.live is None else shape.live
    torch.testing.assert_close(shape.undo(found, known), shape.undo(found) + known * live)


@settings(deadline=None)
@given(SHAPES)
def test_the_pattern_is_what_noise_is_multiplied_by_but_for_the_length(shape: NoiseShape) -> None:
    ones = torch.ones(TOKENS, WIDTH, dtype=torch.float64)
    pattern, length = shape.pattern(ones), 1.0 if shape.length is None else shape.length
    torch.testing.assert_close(shape.apply(ones.unsqueeze(0))[0], ones * (1.0 if pattern is None else pattern) * length)
    if pattern is None:
        assert shape.size is None and shape.live is None and shape.alive is None
    else:
        assert pattern.shape == ones.shape


def test_no_shape_leaves_noise_as_it_is() -> None:
    white = signs(TOKENS, WIDTH)
    assert NoiseShape().apply(white) is white and NoiseShape().undo(white) is white


@settings(deadline=None)
@given(st.none() | numbers(), st.booleans(), st.integers(0, 100))
def test_a_length_and_own_weights_compose(length: Tensor | None, bias: bool, seed: int) -> None:
    """Both applied and both undone in turn, over all signs: the gradient of the convolution's weight."""
    generator = torch.Generator().manual_seed(seed)
    conv = nn.Conv1d(1, 1, 2, bias=bias).double()
    x = torch.randn(2, 1, 5, generator=generator, dtype=torch.float64)
    slope = torch.randn(2, 1, 4, generator=generator, dtype=torch.float64)
    offset = None if conv.bias is None else conv.bias.detach()
    args = (x, conv.weight.detach(), offset, (1,), (0,), (1,), False, (0,), 1)
    done = Done(torch.ops.aten.convolution.default, args, {}, torch.ops.aten.convolution.default(*args))
    own, shape = OwnWeights(conv.weight.shape, bias), NoiseShape(length)

    white = signs(2, own.numbers)
    known = own.shape(done)
    scalars = (own.apply(done, shape.apply(white), known) * slope).flatten(1).sum(1) / len(white)
    found = own.undo(shape.undo((scalars.reshape(-1, 1, 1) * white).sum(0)), known)

    expected = torch.autograd.grad(conv(x), list(conv.parameters()), slope)
    for gradient, exact in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(gradient, exact, rtol=1e-8, atol=1e-8)
