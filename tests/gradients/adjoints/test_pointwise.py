"""The adjoints of pointwise operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adjoint_cases import BY_MODULE, X, aten, check_record, paths_of, positive
from exactness import normal
from jetplane.gradients.adjoints import adjoint as table
from jetplane.gradients.adjoints.default import product, vjp
from jetplane.gradients.program.done import Done


@pytest.mark.parametrize("op", BY_MODULE["pointwise"], ids=str)
def test_a_record_equals_the_default(op: Any) -> None:
    check_record(op)


@pytest.mark.parametrize("name", ["tanh", "mul", "div", "clamp", "atan2", "hardtanh"])
def test_elementwise_operations_share_a_record(name: str) -> None:
    func = {"tanh": aten.tanh.default, "mul": aten.mul.Tensor, "div": aten.div.Tensor, "clamp": aten.clamp.default,
            "atan2": aten.atan2.default, "hardtanh": aten.hardtanh.default}[name]  # fmt: skip
    args = {"mul": (normal(*X), normal(3)), "div": (normal(3), positive(*X)), "atan2": (normal(*X), positive(*X)),
            "clamp": (normal(*X), -0.5, 0.5)}.get(name, (normal(*X),))  # fmt: skip
    done, record = Done(func, args, {}, func(*args)), table.lookup(func)
    assert record.scales
    for path in paths_of(done):
        delta = torch.randn_like(done.result)
        torch.testing.assert_close(record.pull(delta, done, path), vjp(delta, done, path), rtol=0, atol=1e-12)
        torch.testing.assert_close(product(delta, done, path), vjp(delta, done, path), rtol=0, atol=1e-12)
