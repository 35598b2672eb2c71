"""Writes to a part of a memory leave the other parts as they are: gates of a recurrent cell, columns of a matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from exactness import check_exact, normal
from jetplane.ad.storage_geometry import geometry, overlap
from jetplane.gradients.program.writes import Writes

B = 4
LABELS = torch.arange(B) % 3


def views(draw: st.DrawFn, base: Tensor) -> Tensor:
    """A part of ``base``: slices, steps, a transpose, an entry of an axis."""
    for axis in range(base.ndim):
        start = draw(st.integers(0, base.shape[axis] - 1))
        length = draw(st.integers(0, base.shape[axis] - start))
        base = base.narrow(axis, start, length)
        if length > 1 and draw(st.integers(0, 4)) == 0:
            base = base[(slice(None),) * axis + (slice(None, None, 2),)]
    kind = draw(st.integers(0, 5))
    if kind == 0 and base.ndim > 1:
        base = base.transpose(0, 1)
    if kind == 1 and base.shape[-1]:
        base = base.select(-1, 0)
    return base


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    base = torch.arange(draw(st.integers(0, 3)) + torch.Size(shape).numel())
    base = base[-torch.Size(shape).numel() :].reshape(shape)  # may begin somewhere in its memory
    return views(draw, base), views(draw, base)


@settings(max_examples=500, deadline=None)
@given(pairs())
def test_what_is_apart_has_no_element_in_common(two: tuple[Tensor, Tensor]) -> None:
    one, other = two
    if not overlap(geometry(one), geometry(other)):
        assert not set(one.flatten().tolist()) & set(other.flatten().tolist())


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), st.integers(2, 12), st.integers(0, 11), st.integers(0, 11), st.integers(0, 3))
def test_columns_are_told_apart(rows: int, width: int, first: int, second: int, more: int) -> None:
    base, (first, second) = torch.arange(rows * width).reshape(rows, width), (first % width, second % width)
    one = base[:, first : first + 1 + more]
    other = base[:, second : second + 1 + more]
    common = set(one.flatten().tolist()) & set(other.flatten().tolist())
    assert overlap(geometry(one), geometry(other)) == bool(common)


def test_writes_are_counted_from_when_they_were_looked_at() -> None:
    base, seen = torch.zeros(3, 4), Writes()
    left, right = base.split(2, 1)
    seen.note(left)
    assert seen.count(right) == 1 and seen.touched(left, 0) and not seen.touched(left, 1) and not seen.touched(right, 0)
    seen.note(base)
    assert seen.touched(right, 1) and not seen.touched(torch.zeros(2), 0)


class Gated(nn.Module):
    """One half of a layer's output is overwritten, and then the other."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(3, 8), nn.Linear(4, 3), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        left, right = {"slices": (h[:, :4], h[:, 4:]), "split": h.split(4, 1)}.get(self.how) or h.unsafe_chunk(2, 1)
        if self.how == "apart":
            return self.b(left.sigmoid() * right.tanh())
        left.sigmoid_()
        right.tanh_()
        return self.b(left * right)


def test_halves_that_are_overwritten_one_after_the_other() -> None:
    model = Gated("unsafe").double()
    sites = check_exact(model, lambda x, y: F.cross_entropy(model(x), y, reduction="none"), normal(B, 3), LABELS)
    assert [tuple(site.shape) for site in sites] == [(B, 4)]  # behind the gate


@pytest.mark.parametrize("how", ["slices", "split"])  # which a backward pass refuses
def test_views_of_one_memory_that_are_overwritten(how: str) -> None:
    x, model = normal(B, 3), Gated("apart").double()

    def estimated() -> list[Tensor]:
        model.zero_grad()
        jp.ForwardGradient(model.parameters())(lambda x: F.cross_entropy(model(x), LABELS, reduction="none"), x)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted = estimated()
    model.how = how
    torch.testing.assert_close(estimated(), wanted)


class Overwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = h.square()
        h.detach()[:, 1:].zero_()  # what the derivative of the square is read from
        return self.b(y.tanh())


def test_what_was_overwritten_is_refused() -> None:
    model = Overwritten()
    with pytest.raises(jp.UnsupportedProgram, match=r"the \(4, 4\) that .* read or made was overwritten before its"):
        jp.ForwardGradient(model.parameters())(
            lambda x: F.cross_entropy(model(x), LABELS, reduction="none"), torch.randn(B, 3)
        )
