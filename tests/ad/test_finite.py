"""Finite or not: asked of sums first, which may overflow where no entry does."""

from __future__ import annotations

import pytest
import torch

import jetplane as jp
from jetplane.ad.finite import finite

LARGE = torch.finfo(torch.float32).max


@pytest.mark.parametrize("size", [3, 1000])  # by Python, and by torch
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_entry_of_one_tensor_counts(size: int, value: float) -> None:
    tensors = [torch.randn(size), torch.randn(size, dtype=torch.float64), torch.randn(2, 0)]
    assert finite(tensors)
    tensors[1][size // 2] = value
    assert not finite(tensors)


def test_infinities_that_cancel_are_not_finite() -> None:
    one = torch.zeros(1000)
    one[3], one[4] = torch.inf, -torch.inf
    assert not finite([one])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_finite_entries_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    one = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert not one.sum().isfinite()
    assert finite([one, one])


def test_the_error_names_the_tensor() -> None:
    primals = {"a": torch.zeros(40), "b": torch.zeros(40)}
    directions = {"a": torch.full((2, 40), LARGE), "b": torch.zeros(2, 40)}
    directions["b"][1, 7] = torch.nan
    with pytest.raises(ValueError, match=r"directions for primal 1 hold values that are not finite"):
        jp.quadratic(lambda p: (p["a"] * p["b"]).sum(), primals, directions)
