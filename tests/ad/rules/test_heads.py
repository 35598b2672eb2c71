"""Second rows of softmax and sigmoid that are made after the fact, and which results are such a head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from jetplane import PairSet
from jetplane.ad.rules.heads import HEADS, Head, LogSigmoid, LogSoftmax, Sigmoid, Softmax
from jetplane.ad.storage_geometry import geometry

aten = torch.ops.aten
KINDS: list[tuple[type[Head], Callable[[Tensor], Tensor]]] = [
    (LogSoftmax, lambda z: z.log_softmax(1)),
    (Softmax, lambda z: z.softmax(1)),
    (LogSigmoid, torch.nn.functional.logsigmoid),
    (Sigmoid, torch.sigmoid),
]


@pytest.mark.parametrize(("kind", "function"), KINDS, ids=[kind.__name__ for kind, _ in KINDS])
def test_second_rows_follow_from_value_and_tangents(kind: type[Head], function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    z, v = torch.randn(4, 3, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    t = torch.zeros(2, dtype=torch.float64)
    along = lambda t: function(z + torch.einsum("k,kij->ij", t, v))  # noqa: E731
    y, tangent = along(t), torch.func.jacrev(along)(t).movedim(-1, 0)
    curved = torch.func.hessian(along)(t)
    found = kind(1, geometry(y)).second(PairSet.all(2), y, tangent)
    pairs = [(0, 0), (0, 1), (1, 1)]
    torch.testing.assert_close(found, torch.stack([curved[..., i, j] for i, j in pairs]))


def follow(op: object, before: Head | None, *args: object) -> Head | None:
    """The head that the result of an operation is."""
    return HEADS[op](args, op(*args), before)  # type: ignore[operator]


def test_a_logarithm_of_a_head_is_one() -> None:
    y = torch.rand(2, 3)
    softmax = follow(aten._softmax, None, y, -1, False)
    assert type(softmax) is Softmax and softmax.axis == 1
    assert type(follow(aten.log, Softmax(1, geometry(y)), y)) is LogSoftmax
    assert type(follow(aten.log, Sigmoid(0, geometry(y)), y)) is LogSigmoid
    assert follow(aten.log, LogSoftmax(1, geometry(y)), y) is None
    assert follow(aten.log, None, y) is None


def test_a_head_stays_one_where_its_elements_move() -> None:
    y, index = torch.rand(4, 3), torch.tensor([0, 2])
    head = Softmax(1, geometry(y))
    for op, *rest in ((aten.clone,), (aten.index_select, 0, index), (aten.index, [index])):
        moved = follow(op, head, y, *rest)
        assert type(moved) is Softmax and moved.axis == 1
    turned = follow(aten.clone, head, y.T)  # a view with the classes in front
    assert turned is not None and turned.axis == 0


def test_a_head_whose_classes_are_apart_is_none() -> None:
    y, index = torch.rand(4, 3), torch.tensor([0, 2])
    head = Softmax(1, geometry(y))
    assert follow(aten.index_select, head, y, 1, index) is None
    assert follow(aten.index, head, y, [None, index]) is None
    assert follow(aten.clone, head, y.reshape(-1)) is None
    assert type(follow(aten.index_select, Sigmoid(0, geometry(y)), y, 1, index)) is Sigmoid  # it has no classes
