"""Indexing, look-ups, and reductions into an index."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jetplane as jp
from cases import assert_close, assert_quadratic, check_against_oracle, randn
from jetplane.testing.oracle import double_backward

ROWS, COLUMNS = torch.tensor([0, 2, 2]), torch.tensor([1, 0, 1])
MASK = torch.tensor([[True, False], [False, False], [True, True]])


@pytest.mark.parametrize(
    "take",
    [
        lambda x: x[ROWS],
        lambda x: x[:, COLUMNS],
        lambda x: x[ROWS, COLUMNS],
        lambda x: x[ROWS, :, COLUMNS],  # not side by side: their axis comes first
        lambda x: x[:, COLUMNS, COLUMNS],
        lambda x: x[MASK],
        lambda x: x[MASK[:, 0]],
    ],
)
def test_places_are_those_of_a_loop(take: Callable[[Tensor], Tensor]) -> None:
    shape = (3, 2, 4)
    places = take(torch.arange(24).reshape(shape))  # where each entry of the result comes from

    def by_loop(x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        return sum(flat[int(place)].sin() ** 2 * (n + 1) for n, place in enumerate(places.reshape(-1)))

    def program(x: Tensor) -> Tensor:
        found = take(x)
        return (found.sin() ** 2 * (torch.arange(found.numel()) + 1).reshape(found.shape)).sum()

    check_against_oracle(program, randn(*shape), twin=by_loop)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean", "prod"])
def test_reductions_into_an_index_are_those_of_a_loop(reduce: str, include: bool) -> None:
    index = torch.tensor([0, 2, 0, 0])

    def by_loop(x: Tensor, source: Tensor) -> Tensor:
        total = torch.zeros((), dtype=x.dtype)
        for slot in range(3):
            given = [source[n] for n in range(4) if int(index[n]) == slot]
            parts = torch.stack([x[slot], *given] if include or not given else given)
            total = total + {"sum": parts.sum, "mean": parts.mean, "prod": parts.prod}[reduce]().sin()
        return total

    def program(x: Tensor, source: Tensor) -> Tensor:
        return x.scatter_reduce(0, index, source, reduce, include_self=include).sin().sum()

    check_against_oracle(program, randn(3), randn(4), twin=by_loop)


def test_an_embedding_with_a_largest_norm_is_shortened_and_varies_as_it_is() -> None:
    # torch shortens the rows of the detached weight, in place, before it takes them
    start, v, index = 3 * randn(5, 3), randn(2, 5, 3), torch.tensor([0, 2, 2])

    def loss() -> Tensor:
        return F.embedding(index, weight, max_norm=1.0).pow(3).sum() + weight.square().sum()

    weight = torch.nn.Parameter(start.clone())
    expected = double_backward(loss, [weight], [v])
    short = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(start)
    with jp.perturb([weight], [v]) as jets:
        result = loss()
    assert_quadratic(jets.quadratic(result), expected)
    assert_close(weight.detach(), short)
    assert_close(short[[0, 2]].norm(dim=1), torch.ones(2).double(), tolerance=1e-6)
