"""The kernel that draws normal numbers on CUDA gives the counter's own, bit by bit: here under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jetplane.directions import counter, weighed
from jetplane.directions.counter import Stream

# (seed, step, sample, position, first row, last row, entries): ends of the ranges, tails of a block, several programs
CASES = [
    (0, 0, 0, 0, 0, 1, 1),
    (0, 0, 0, 0, 0, 3, 5),
    (1, 2, 3, 4, 1, 3, 7),
    (2**64 - 1, 2**32 - 1, 2**16 - 1, 2**16 - 1, 0, 2, 33),
    (2**63, 2**31, 2**15, 1, 5, 6, 1023),
    (0x0123456789ABCDEF, 1000, 0, 17, 0, 2, 2501),
    (7, 7, 7, 7, 0, 2, 0),
]

# a parameter (n,), rows (K, n), and numbers (S, K + 1): the coefficients and the factor of each step
SUMMED = """(
    torch.linspace(-1, 1, 2501, dtype=torch.float64),
    torch.linspace(-3, 2, 3 * 2501, dtype=torch.float64).sin().reshape(3, 2501),
    torch.tensor([[0.3, -0.7, 1.0], [1e-3, 0.1, 0.3], [-2.0, 0.0, 1.0]], dtype=torch.float64),
)"""

KERNEL = """
import sys
import torch
from jetplane.directions import kernels

def signed(word):
    return word - (1 << 64) if word >= 1 << 63 else word

cases, kinds = eval(sys.argv[1]), (torch.float32, torch.float64)
drawn = {}
for seed, step, sample, position, start, stop, size in cases:
    for kind in kinds:
        words = torch.tensor(signed(seed)), torch.tensor(step)
        numbers = kernels.normal(*words, position | sample << 16, start, stop, size, kind)
        drawn[str((seed, step, sample, position, start, stop, size, str(kind)))] = numbers
for kind in kinds:
    leaf, rows, numbers = (part.to(kind) for part in eval(sys.argv[3]))
    kernels.along(leaf, torch.tensor([5, 0, 7, 2**32 - 1]), 3, numbers)
    drawn[f"along {kind}"], drawn[f"sum {kind}"] = leaf, kernels.in_order(numbers[0], rows)
torch.save(drawn, sys.argv[2])
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_equals_the_counter_bit_by_bit(tmp_path: Path) -> None:
    # a process of its own: Triton decides at its import whether to interpret
    found = tmp_path / "drawn.pt"
    script = [sys.executable, "-c", KERNEL, repr(CASES), str(found), SUMMED]
    ran = subprocess.run(script, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    drawn = torch.load(found, weights_only=True)
    assert len(drawn) == 2 * len(CASES) + 4
    for kind in (torch.float32, torch.float64):
        leaf, rows, numbers = (part.to(kind) for part in eval(SUMMED))
        assert torch.equal(drawn[f"sum {kind}"], weighed.in_order(numbers[0], rows))
        for step, (*shares, factor) in zip((0, 7, 2**32 - 1), numbers, strict=True):
            drawn_rows = counter.normal(Stream(5, step, 0, 3), 0, 2, 2501, dtype=kind, device=torch.device("cpu"))
            leaf += (drawn_rows[0] * shares[0] + drawn_rows[1] * shares[1]) * factor
        assert torch.equal(drawn[f"along {kind}"], leaf)
    for seed, step, sample, position, start, stop, size in CASES:
        for kind in (torch.float32, torch.float64):
            stream = Stream(seed, step, sample, position)
            expected = counter.normal(stream, start, stop, size, dtype=kind, device=torch.device("cpu"))
            actual = drawn[str((seed, step, sample, position, start, stop, size, str(kind)))]
            assert actual.dtype == kind and torch.equal(actual, expected), (seed, step, size, kind)


@pytest.mark.parametrize("case", [case for case in CASES if case[-1]], ids=str)
def test_words_made_without_overflow_are_the_same_words(case: tuple[int, ...]) -> None:
    seed, step, sample, position, start, stop, size = case
    word = seed - (1 << 64) if seed >= 1 << 63 else seed
    options = {"dtype": torch.float64, "device": torch.device("cpu")}
    expected = counter.rademacher(Stream(*case[:4]), start, stop, size, **options)
    stream = Stream(torch.tensor(word), torch.tensor(step), sample, position)
    assert torch.equal(counter.rademacher(stream, start, stop, size, **options), expected)
