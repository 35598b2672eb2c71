"""The kernel that makes signs makes those of the counter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jetplane.gradients.noise.signs import Signs

KERNEL = """
import sys
import torch
from jetplane.gradients.noise import signs_triton

drawn = {}
for case in eval(sys.argv[1]):
    seed, step, place, start, stop, size, first = case
    for kind in (torch.float32, torch.float64, torch.bfloat16):
        words = torch.tensor(seed), torch.tensor(step), None if first is None else torch.tensor(first)
        drawn[str((*case, str(kind)))] = signs_triton.signs(*words, place, start, stop, size, kind)
torch.save(drawn, sys.argv[2])
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_makes_the_same_signs(tmp_path: Path) -> None:
    # a process of its own: Triton decides at its import whether to interpret
    whole = [(7, 3, 5, 2, 6, 187), (-1, 2**32 - 1, 2**16 - 1, 0, 2, 5000), (0, 0, 0, 0, 1, 1), (1, 1, 1, 0, 1, 0)]
    cases = [(*case, None) for case in whole] + [(7, 3, 5, 2, 6, 187, first) for first in (0, 1, 127, 128, 129, 3000)]
    cases += [(7, 3, 5, 0, 1, 5000, 2047), (7, 3, 5, 0, 1, 2048, 100)]  # one counter more than there is room for
    given = [(seed, step, site | 1 << 31, *rest) for seed, step, site, *rest in cases]
    script = [sys.executable, "-c", KERNEL, repr(given), str(tmp_path / "drawn.pt")]
    ran = subprocess.run(script, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    drawn = torch.load(tmp_path / "drawn.pt", weights_only=True)
    for (seed, step, site, start, stop, size, first), key in zip(cases, given, strict=True):
        for kind in (torch.float32, torch.float64, torch.bfloat16):
            before = first or 0
            expected = Signs(seed % 2**64, step).rows(site, start, stop, torch.zeros(before + size, dtype=kind))
            assert torch.equal(drawn[str((*key, str(kind)))], expected[:, before:])
