"""Normal numbers as an operation of traced programs."""

from __future__ import annotations

import pytest
import torch

from jetplane.directions import counter, traced
from jetplane.directions.counter import Stream
from test_kernels import CASES


@pytest.mark.parametrize("kind", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_operation_of_traced_programs_equals_the_counter_bit_by_bit(
    case: tuple[int, ...], kind: torch.dtype
) -> None:
    seed, step, sample, position, start, stop, size = case
    like, word = torch.zeros(size, dtype=kind), seed - (1 << 64) if seed >= 1 << 63 else seed
    expected = counter.normal(Stream(*case[:4]), start, stop, size, dtype=kind, device=like.device)
    for stream in (Stream(*case[:4]), Stream(torch.tensor(word), torch.tensor(step), sample, position)):
        assert torch.equal(traced.normal(stream, start, stop, size, dtype=kind, like=like), expected)
