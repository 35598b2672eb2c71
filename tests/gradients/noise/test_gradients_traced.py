"""The operations of a traced estimate."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from jetplane.gradients.noise import traced
from jetplane.gradients.noise.signs import Signs


@pytest.mark.parametrize("shape", [(3, 50), (1,), (2, 5, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_signs_of_the_operation_are_those_of_the_counter(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    like = torch.zeros(shape, dtype=dtype)
    words = torch.tensor(-3), torch.tensor(11)  # a seed of 64 bits, as int64 has it
    rows = Signs(*words).rows(4, 2, 5, like)
    assert torch.equal(rows, Signs((1 << 64) - 3, 11).rows(4, 2, 5, like)) and rows.dtype == dtype


def test_a_trace_draws_anew_for_each_step() -> None:
    like = torch.zeros(40)
    graph = make_fx(lambda seed, step: Signs(seed, step).rows(0, 0, 2, torch.zeros(40)), tracing_mode="fake")(
        torch.tensor(5), torch.tensor(0)
    )
    for step in (0, 1, 7):
        assert torch.equal(graph(torch.tensor(5), torch.tensor(step)), Signs(5, step).rows(0, 0, 2, like))


@pytest.mark.parametrize("first", [0, 5, 128, 1000])
def test_signs_of_a_part_are_those_of_the_counter(first: int) -> None:
    like, words = torch.zeros(3, 50), (torch.tensor(-3), torch.tensor(11))
    whole = Signs(*words).rows(4, 2, 5, torch.zeros(first + 150))[:, first:].reshape(3, 3, 50)
    graph = make_fx(lambda seed, step, place: Signs(seed, step).part(4, 2, 5, like, place), tracing_mode="fake")(
        *words, torch.tensor(0)
    )
    assert torch.equal(graph(*words, torch.tensor(first)), whole)  # the place is read, not baked in
    assert torch.equal(Signs((1 << 64) - 3, 11).part(4, 2, 5, like, first), whole)


def test_a_copy_is_another_tensor_with_the_same_numbers() -> None:
    x = torch.randn(3, 4)
    other = traced.again(x)
    assert torch.equal(other, x) and other.data_ptr() != x.data_ptr()
    graph = make_fx(lambda x: traced.again(x) + 1, tracing_mode="fake")(x)
    assert any(node.target is torch.ops.jetplane.again.default for node in graph.graph.nodes)
