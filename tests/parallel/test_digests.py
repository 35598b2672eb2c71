"""Hashes and texts by which processes compare."""

from __future__ import annotations

import pytest
import torch

from jetplane.directions import Gaussian, Grown
from jetplane.parallel.digests import described, digest_of, tag_of


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_bit_makes_another_digest(dtype: torch.dtype) -> None:
    one = torch.ones(9, dtype=dtype)
    other = one.clone()
    other[8] += torch.finfo(dtype).eps
    assert digest_of([one]) == digest_of([one.clone()]) != digest_of([other])


def test_memory_that_is_laid_out_otherwise_has_the_same_digest() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert digest_of([x.T.contiguous().T]) == digest_of([x])


def test_functions_are_described_without_addresses() -> None:
    first, second = Grown(lambda k: Gaussian(k)), Grown(lambda k: Gaussian(k))
    assert repr(first) != repr(second) and described(first) == described(second)


def test_a_tag_survives_float64() -> None:
    tag = tag_of("anything")
    assert tag == int(tag) < 2**53
