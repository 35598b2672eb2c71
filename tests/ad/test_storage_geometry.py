"""Where tensors lie in memory: against the sets of the places of all their elements."""

import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import jetplane as jp
from jetplane.ad import storage_geometry
from jetplane.ad.storage_geometry import Geometry, covers, elements, geometry, inside, overlap, span, written

aten = torch.ops.aten
ROOM = 60


def places(place: Geometry) -> set[int]:
    shape, strides, offset = place
    indices = itertools.product(*map(range, shape))
    return {offset + sum(i * s for i, s in zip(index, strides, strict=True)) for index in indices}


def views(tensor: Tensor, draw: st.DrawFn) -> Tensor:
    """A view of a view: slices, transposes, expanded and diagonal ones."""
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["slice", "select", "transpose", "expand", "diagonal"]))
        axis = draw(st.integers(0, tensor.ndim - 1)) if tensor.ndim else None
        if kind == "expand":
            tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
        elif axis is None:
            continue
        elif kind == "slice":
            start = draw(st.integers(0, tensor.shape[axis]))
            length = draw(st.integers(0, tensor.shape[axis] - start))
            tensor = tensor.narrow(axis, start, length)
            keep = (slice(None),) * axis
            tensor = tensor[(*keep, slice(None, None, draw(st.integers(1, 3))))]
        elif kind == "select" and tensor.shape[axis]:
            tensor = tensor.select(axis, draw(st.integers(0, tensor.shape[axis] - 1)))
        elif kind == "transpose":
            tensor = tensor.transpose(axis, 0)
        elif kind == "diagonal" and tensor.ndim >= 2:
            tensor = tensor.diagonal()
    return tensor


@st.composite
def any_place(draw: st.DrawFn) -> Geometry:
    """Shape, strides and offset as as_strided takes them, of at most ROOM elements."""
    offset, left = draw(st.integers(0, 20)), ROOM - 21
    shape, strides = [], []
    for _ in range(draw(st.integers(0, 3))):
        n = draw(st.integers(0, 4))
        stride = draw(st.integers(0, left // max(n - 1, 1)))
        left -= max(n - 1, 0) * stride
        shape.append(n)
        strides.append(stride)
    return tuple(shape), tuple(strides), offset


@st.composite
def two_views(draw: st.DrawFn) -> tuple[Geometry, Geometry]:
    base = torch.empty(draw(st.sampled_from([(4, 6), (2, 3, 4), (24,), (5, 7), ()])))
    return geometry(views(base, draw)), geometry(views(base, draw))


@settings(max_examples=1500)
@given(st.tuples(any_place(), any_place()) | two_views())
def test_overlap_is_exact_and_what_is_inside_is_so(two: tuple[Geometry, Geometry]) -> None:
    one, other = two
    mine, theirs = places(one), places(other)
    assert overlap(one, other) == overlap(other, one) == bool(mine & theirs)
    assert not inside(one, other) or mine <= theirs
    assert not inside(other, one) or theirs <= mine


@settings(max_examples=500)
@given(any_place(), any_place())
def test_of_many_trials_overlap_says_that_there_may_be_some(one: Geometry, other: Geometry) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_geometry, "_MOST", 1)
        found = overlap(one, other)
    assert found or not places(one) & places(other)


@settings(max_examples=1000)
@given(st.data())
def test_every_view_of_a_tensor_is_inside(data: Any) -> None:
    base = torch.empty(6, 8)
    whole = data.draw(st.sampled_from([base, base[:, 2:5], base[::2, 1::3], base.T, base[1], base[:, :3].T]))
    assert inside(geometry(views(whole, data.draw)), geometry(whole))


@given(any_place())
def test_span(place: Geometry) -> None:
    if 0 not in place[0]:
        assert span(place) == (min(places(place)), max(places(place)))


@settings(max_examples=500)
@given(any_place(), st.integers(0, 5))
def test_covers_means_that_each_element_is_there_once(place: Geometry, more: int) -> None:
    used = places(place)
    storage = torch.empty(max(used, default=-1) + 1 + (more if more < 3 else 0))
    view = storage.as_strided(*place) if storage.numel() else storage
    once = len(places(geometry(view))) == view.numel()
    assert covers(view) == (once and places(geometry(view)) == set(range(elements(view, view.dtype))))


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expected"),
    [
        (aten.add.Tensor, "xy", {}, ""),
        (aten.add_.Tensor, "xy", {}, "x"),
        (aten.add.out, "xy", {"out": "z"}, "z"),
        (aten._foreach_add_.List, [["x", "y"], ["z", "z"]], {}, "xy"),
        (aten.transpose_.default, ["x", 0, 1], {}, ""),
        (aten.native_batch_norm.default, [*"xyzuv", True, 0.1, 1e-5], {}, "uv"),
        (aten.native_batch_norm.default, ["x", "y", "z", None, None, True, 0.1, 1e-5], {}, ""),
        (aten.batch_norm.default, [*"xyzuv", True, 0.1, 1e-5, True], {}, "uv"),
        (aten.instance_norm.default, [*"xyzuv", True, 0.1, 1e-5, True], {}, "uv"),
        (aten.index_put_.default, ["x", ["y"], "z"], {}, "x"),
    ],
)
def test_what_an_operation_writes(func: Any, args: Any, kwargs: Any, expected: str) -> None:
    tensors = {name: torch.zeros(2, 2) for name in "xyzuv"}

    def real(value: Any) -> Any:
        if isinstance(value, list):
            return [real(item) for item in value]
        return tensors[value] if isinstance(value, str) else value

    found = written(func, [real(one) for one in args], {name: real(one) for name, one in kwargs.items()})
    assert [id(one) for one in found] == [id(tensors[name]) for name in expected]


# -- what it is for ------------------------------------------------------------------------------------------------


def halves(w: Tensor, how: str) -> list[Tensor]:
    return {
        "columns": [w[:, :2], w[:, 2:]],
        "interleaved": [w[::2], w[1::2]],
        "interleaved columns": [w[:, ::2], w[:, 1::2]],
        "transposed": [w.T[:3], w.T[3:]],
        "views of views": [w[:, :3][1:, 1:], w[:, 3:][:, 1:]],
    }[how]


HOW = ["columns", "interleaved", "interleaved columns", "transposed", "views of views"]


@pytest.mark.parametrize("how", HOW)
def test_leaves_that_share_a_storage_and_no_element(how: str) -> None:
    torch.manual_seed(0)
    w = torch.randn(4, 6, dtype=torch.float64)
    leaves = halves(w, how)
    directions = [torch.randn(3, *leaf.shape, dtype=w.dtype) for leaf in leaves]
    with jp.perturb(leaves, directions) as jets:
        loss = (w.sin() * w.cumsum(1)).sum() + (leaves[0].sum() * leaves[1].sum()).exp() / 100
    whole = torch.zeros(3, 4, 6, dtype=w.dtype)
    for k in range(3):
        for part, direction in zip(halves(whole[k], how), directions, strict=True):
            part.copy_(direction[k])

    def func(w: Tensor) -> Tensor:
        one, other = halves(w, how)
        return (w.sin() * w.cumsum(1)).sum() + (one.sum() * other.sum()).exp() / 100

    found, truth = jets.quadratic(loss), jp.quadratic(func, w, whole)
    torch.testing.assert_close(found.slope, truth.slope)
    torch.testing.assert_close(found.curvature, truth.curvature)


@pytest.mark.parametrize("cut", [(slice(None), slice(1, 3)), (slice(1, 2),), (slice(None), slice(1, None, 2))])
def test_leaves_that_share_an_element_are_refused(cut: Any) -> None:
    w = torch.zeros(4, 6)
    leaves = [w[:, ::3], w[cut]] if len(cut) == 1 else [w[:, :2], w[cut]]
    with pytest.raises(ValueError, match="parameter 1 shares memory with parameter 0; expected each tensor"):
        jp.perturb(leaves, [torch.zeros(1, *leaf.shape) for leaf in leaves])


def test_a_view_with_as_many_elements_as_its_storage_need_not_cover_it() -> None:
    p = torch.linspace(0.1, 1.0, 4, dtype=torch.float64)
    with jp.perturb([p], [torch.eye(4, dtype=p.dtype)], curvature="ggn"):
        early = p.sin() @ torch.eye(4, dtype=p.dtype)
        late = jp.mark_output(p.exp()).square().reshape(2, 2)
        with pytest.raises(jp.MissingBoundary, match="writes the loss into memory that holds something which did not"):
            early.as_strided((2, 2), (1, 1)).copy_(late)  # places 0, 1, 1 and 2: the last one stays early


@pytest.mark.parametrize("use", ["the leaves", "rows of a leaf"])
@pytest.mark.parametrize("how", ["columns", "interleaved columns"])
def test_forward_gradients_of_leaves_that_share_a_storage(how: str, use: str) -> None:
    torch.manual_seed(0)
    w, x = torch.randn(4, 6, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    leaves = [leaf.requires_grad_() for leaf in halves(w, how)]

    def losses() -> Tensor:
        one, other = leaves
        first = other[0] if use == "rows of a leaf" else other.sum(0)
        return (x @ one[:, :2].T).square().sum(1) + (x @ first[:2]).square()

    expected = torch.autograd.grad(
        (x @ leaves[0][:, :2].T).square().sum(1).mean()
        + (x @ (leaves[1][0] if use == "rows of a leaf" else leaves[1].sum(0))[:2]).square().mean(),
        leaves,
    )
    jp.forward_gradient(losses, leaves)
    for leaf, truth in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, truth)


def test_forward_gradients_take_other_tensors_in_a_leaf_s_memory_for_constants() -> None:
    w, x = torch.randn(4, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    leaves = [w[:, :2].requires_grad_(), w[:, 2:].requires_grad_()]
    with pytest.raises(jp.UnsupportedProgram, match="the losses do not depend on parameter 0, parameter 1"):
        jp.forward_gradient(lambda: (x @ w.T).square().sum(1), leaves)


def test_forward_gradients_refuse_memory_of_which_a_part_is_a_parameter() -> None:
    w, x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True) * 1, torch.randn(5, 6, dtype=torch.float64)
    leaves = [w.detach()[:, :2].requires_grad_(), w.detach()[:, 2:].requires_grad_()]
    message = r"uses a tensor \(6, 4\) of which only a part is parameter 0, parameter 1; expected parameters that"
    with pytest.raises(jp.UnsupportedProgram, match=message):
        jp.forward_gradient(lambda: (x @ w.T).square().sum(1), leaves)
