"""Which chains of a captured program become one operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from jetplane.compiler.fusion import fused
from pooled_layers import LAYERS, Layers, program

CHAINS = ["relu, pool", "pool, relu", "in place", "pool, in place", "one more", "one more in place"]


def operations(func: Any, params: dict[str, Tensor]) -> list[Any]:
    """The operations of the captured program after fusion."""
    from jetplane.compiler.capture import Captured, single

    seen: list[Any] = []

    def build(graph: Any, inputs: Any) -> Any:
        seen.extend(node.target for node in fused(graph._module).graph.nodes)
        assert torch.equal(graph(inputs)[0], graph.for_jets(inputs)[0])
        return graph

    with torch.no_grad():
        Captured(build, single)(func, (params,))
    return seen


@pytest.mark.parametrize("kind", LAYERS)
def test_a_chain_is_one_operation_and_nothing_else_is(kind: str) -> None:
    func, params, _ = program(kind)
    count = operations(func, params).count(torch.ops.jetplane.convolution_relu_pool.default)
    assert count == (1 if kind in CHAINS else 0)


def test_both_layers_of_two_are_fused() -> None:
    func, params, _ = program("relu, pool", "pool, relu")
    found = operations(func, params)
    assert found.count(torch.ops.jetplane.convolution_relu_pool.default) == 2
    assert F.relu not in found


def test_groups_images_without_a_batch_and_padding_by_name_are_left() -> None:
    w = torch.randn(2, 1, 3, 3)

    def loss(params: dict[str, Tensor]) -> Tensor:
        x = params["x"]
        a = F.max_pool2d(F.relu(F.conv2d(x, w, groups=2)), 2)
        b = F.max_pool2d(F.relu(F.conv2d(x[0], w.expand(2, 2, 3, 3))), 2)
        c = F.max_pool2d(F.relu(F.conv2d(x, w.expand(2, 2, 3, 3), padding="same")), 2)
        return a.sum() + b.sum() + c.sum()

    found = operations(loss, {"x": torch.randn(2, 2, 6, 6)})
    assert torch.ops.jetplane.convolution_relu_pool.default not in found


def test_what_autocast_would_cast_is_left() -> None:
    model = Layers("relu, pool")
    x, params = torch.randn(2, 1, 8, 8), {name: value.detach() for name, value in model.named_parameters()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.func.functional_call(model, params, (x,)).float().mean()

    assert torch.ops.jetplane.convolution_relu_pool.default not in operations(loss, params)
