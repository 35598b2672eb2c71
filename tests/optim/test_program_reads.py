"""What compiled steps remember of what they were made with."""

from __future__ import annotations

import pytest
import torch

from jetplane.errors import CaptureFailed
from jetplane.optim import FoMoHKD
from jetplane.optim.program_reads import check_runs_once, same


def test_objects_are_the_same_and_numbers_are_equal() -> None:
    a, b = torch.ones(2), torch.ones(2)
    assert same([a, 1, 2.5, "x"], [a, 1, 2.5, "x"])
    assert not same([a], [b])  # equal, but another parameter
    assert not same([1], [2])
    assert not same([a], [a, 1])


def test_random_numbers_are_drawn_once() -> None:
    settings = FoMoHKD([torch.ones(2, requires_grad=True)], k=1)._settings
    check_runs_once(False, settings)
    with pytest.raises(CaptureFailed, match="would not be the same in the backward pass"):
        check_runs_once(True, settings)
