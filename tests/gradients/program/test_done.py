"""An operation that has run: its arguments by name, and its first result."""

from __future__ import annotations

import torch

from exactness import normal
from jetplane.gradients.program.done import Done

aten = torch.ops.aten


def test_arguments_are_found_by_name_with_defaults() -> None:
    bias, x, w = normal(5), normal(4, 3), normal(3, 5)
    bound = Done(aten.addmm.default, (bias, x, w), {"alpha": 3}, None).bound()
    assert list(bound) == ["self", "mat1", "mat2", "beta", "alpha"]
    assert bound["mat2"] is w and bound["beta"] == 1 and bound["alpha"] == 3


def test_the_first_result_is_the_one_that_varies() -> None:
    x = normal(4, 6)
    for func, args in ((aten.max.dim, (x, 1)), (aten.split.Tensor, (x, 2)), (aten.relu.default, (x,))):
        out = func(*args)
        first = out if isinstance(out, torch.Tensor) else out[0]
        assert Done(func, args, {}, out).result is first
