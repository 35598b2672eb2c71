"""Pair sets."""

from __future__ import annotations

import pytest
import torch

import jetplane as jp
from cases import assert_close, randn
from rows_of_functions import exact_rows, scalar, vector


@pytest.mark.parametrize("k", [2, 3, 5])
def test_pairs_of_few_numbers_are_those_of_many(k: int) -> None:
    pairs, a, b = jp.PairSet.all(k), randn(k, 1000), randn(k, 1000)
    few, mirrored = (a[:, :4], b[:, :4]), pairs.matrix(pairs.cross(a, b))
    assert torch.equal(pairs.outer(*few), pairs.outer(a, b)[:, :4])
    assert torch.equal(pairs.cross(*few), pairs.cross(a, b)[:, :4])
    assert torch.equal(pairs.matrix(pairs.cross(*few)), mirrored[..., :4])
    assert_close(mirrored, a[:, None] * b + b[:, None] * a)


def test_places_kept_in_inference_mode_serve_autograd() -> None:
    x, v = randn(3).requires_grad_(), randn(6, 3)  # six directions: a number that no other test has
    with torch.inference_mode():
        jp.jet(scalar, x.detach(), v)
    jp.jet(scalar, x, v).second.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_jet_with_a_pair_set_of_ones_own(chunk_size: int | None) -> None:
    x, v = randn(3), randn(4, 3)
    _, slope, curvature = exact_rows(vector, x, v)
    chosen = ((0, 3), (2, 1), (3, 3))
    jet = jp.jet(vector, x, v, jp.PairSet(4, chosen), chunk_size=chunk_size)
    assert_close(jet.tangent, slope)
    assert_close(jet.second, torch.stack([curvature[i, j] for i, j in chosen]))
    weighted = jp.jet(vector, x, v, jp.PairSet(4, chosen, (1.0, -2.0, 0.5)), chunk_size=chunk_size)
    expected = curvature[0, 3] - 2 * curvature[2, 1] + 0.5 * curvature[3, 3]
    assert_close(weighted.second, expected[None])
    block = jp.jet(vector, x, v, jp.PairSet.between(1, 3), chunk_size=chunk_size)
    assert_close(block.second, curvature[0, 1:])
