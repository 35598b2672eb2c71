"""Records come back from their bytes as they were."""

from __future__ import annotations

import math

import pytest
import torch

from jetplane.journal.step_record import StepRecord, decode, encode
from jetplane.solvers import Status
from journaled import same_bits

PLAIN = StepRecord(7, 2**64 - 1, Status.OK, 0.5, torch.tensor([[1.5, -0.0]]), 1.0, None, [0.1], [0.0], 0)
FULL = StepRecord(
    step=2**32 - 1,
    seed=0,
    status=Status.REJECTED,
    loss=math.inf,
    coefficients=torch.randn(3, 4, dtype=torch.float64),
    factor=0.1,
    block=2,
    lrs=[0.1, 1e-300],
    decays=[0.0, 0.5],
    bad=3,
    solver_state=1e12,
    size=(8, -0.25),
    slopes=torch.randn(3, 4),
    moving=[True, False, True],
    used=[False, True],
    place={"epoch": 3, "file": "ä"},
    buffers={1: b"abc", 4: b""},
    digest=bytes(range(16)),
    absent=[2, 70000],
)


@pytest.mark.parametrize("record", [PLAIN, FULL])
def test_all_parts_come_back(record: StepRecord) -> None:
    found = decode(encode(record))
    for name, expected in record._asdict().items():
        value = getattr(found, name)
        if isinstance(expected, torch.Tensor):
            assert same_bits(value, expected), name
        else:
            listed = isinstance(value, tuple) and name != "size"
            assert (list(value) == list(expected)) if listed else (value == expected), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_coefficients_of_all_dtypes(dtype: torch.dtype) -> None:
    numbers = torch.tensor([[math.nan, -0.0, math.inf, 1e-7]]).to(dtype)
    assert same_bits(decode(encode(PLAIN._replace(coefficients=numbers))).coefficients, numbers)


def test_each_part_alone() -> None:
    for name in ("solver_state", "size", "slopes", "moving", "used", "place", "buffers", "digest"):
        found = decode(encode(PLAIN._replace(coefficients=FULL.coefficients, **{name: getattr(FULL, name)})))
        value, expected = getattr(found, name), getattr(FULL, name)
        assert torch.equal(value, expected) if name == "slopes" else value == expected


def test_a_record_of_one_direction_is_small() -> None:
    assert len(encode(PLAIN._replace(coefficients=torch.ones(1, 1)))) < 80


def test_as_many_planes_as_there_can_be() -> None:
    record = PLAIN._replace(coefficients=torch.zeros(1 << 16, 1))
    assert decode(encode(record)).coefficients.shape == (1 << 16, 1)
