"""The adjoints of norms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from adjoint_cases import BY_MODULE, check_record
from jetplane.gradients.adjoints import normalising
from jetplane.gradients.program.done import Done


@pytest.mark.parametrize("op", BY_MODULE["normalising"], ids=str)
def test_a_record_equals_the_default(op: Any) -> None:
    check_record(op)


@pytest.mark.parametrize("space", [(), (5,), (2, 3)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_group_norm_with_and_without_space(space: tuple[int, ...], place: int) -> None:
    """Each adjoint is backprop's, also for (N, C), whose statistics have as many axes as its values."""
    torch.manual_seed(0)
    values = [torch.randn(4, 6, *space), torch.randn(6), torch.randn(6)]
    leaves = [value.double().requires_grad_() for value in values]
    y = torch.nn.functional.group_norm(leaves[0], 2, leaves[1], leaves[2])
    delta = torch.randn_like(y)
    (wanted,) = torch.autograd.grad(y, leaves[place], delta)
    op = torch.ops.aten.native_group_norm.default
    args = (*(leaf.detach() for leaf in leaves), 4, 6, math.prod(space), 2, 1e-5)
    done = Done(op, args, {}, op(*args))
    torch.testing.assert_close(normalising._group_norm(delta, done, (place,)), wanted)
