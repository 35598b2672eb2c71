"""A few numbers are made in Python, bit by bit those of the counter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetplane.directions import counter as philox_module
from jetplane.directions import (
    scalar,
)
from jetplane.directions.counter import Stream, normal


def test_roots_are_correctly_rounded() -> None:
    x = torch.cat(
        [
            torch.zeros(1, dtype=torch.float64),
            torch.rand(20000, dtype=torch.float64) * 80,
            torch.rand(1000, dtype=torch.float64) * 1e-15,
        ]
    )
    assert philox_module._root(x).tolist() == [math.sqrt(value) for value in x.tolist()]
    short = x.to(torch.float32)
    exact = torch.tensor([math.sqrt(value) for value in short.tolist()], dtype=torch.float64).to(torch.float32)
    assert torch.equal(philox_module._root(short), exact)


@pytest.mark.parametrize("angular", [0, 1 << 30, 2 << 30, 3 << 30])
def test_a_radius_of_zero_has_the_same_sign_in_python(angular: int) -> None:
    words = 0xFFFFFFFF, angular  # a uniform number that is rounded to one
    tensors = tuple(torch.tensor([word]) for word in (*words, *words))
    radius, angle = next(philox_module._pairs32(tensors))
    expected = torch.stack([radius * part for part in philox_module._on_circle(angle, torch.float32)]).flatten()
    actual = torch.tensor(scalar._pair32(*words), dtype=torch.float32)
    assert torch.equal(expected, torch.zeros(2))
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


@given(
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**32 - 1),
    sample=st.integers(0, 2**16 - 1),
    position=st.integers(0, 2**16 - 1),
    start=st.integers(0, 100),
    rows=st.integers(0, 3),
    size=st.integers(0, 9),
    kind=st.sampled_from([(torch.float32, torch.int32), (torch.float64, torch.int64)]),
)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_a_few_numbers_in_python_are_the_same_bits(
    seed: int, step: int, sample: int, position: int, start: int, rows: int, size: int, kind: tuple[Any, Any]
) -> None:
    stream, (dtype, bits) = Stream(seed, step, sample, position), kind
    expected = normal(stream, start, start + rows, size, dtype=dtype, device=torch.device("cpu"))
    actual = scalar.normal(stream, start, start + rows, size, dtype)
    assert actual.shape == expected.shape
    assert torch.equal(actual.view(bits), expected.contiguous().view(bits))
