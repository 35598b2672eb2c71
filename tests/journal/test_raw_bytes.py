"""Tensors as bytes: their bits, in order, whatever the layout."""

from __future__ import annotations

import pytest
import torch

from jetplane.journal.raw_bytes import DIGEST, bytes_of, digest, tensor_of
from journaled import same_bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (2, 0, 3)])
def test_there_and_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 9).abs().to(dtype)
    assert same_bits(tensor_of(bytes_of(tensor), dtype, shape), tensor)


def test_bytes_are_in_the_order_of_the_entries() -> None:
    tensor = torch.arange(6, dtype=torch.uint8).reshape(2, 3).T
    assert bytes_of(tensor) == bytes([0, 3, 1, 4, 2, 5])
    assert bytes_of(torch.tensor(1.0, requires_grad=True)) == b"\x00\x00\x80\x3f"


def test_a_digest_sees_every_bit_and_the_text() -> None:
    tensors = [torch.zeros(4), torch.ones(3, dtype=torch.float64)]
    found = digest(tensors)
    assert len(found) == DIGEST and found == digest([one.clone() for one in tensors])
    tensors[0][2] = -0.0
    assert digest(tensors) != found
    assert digest([], "a") != digest([], "b")
