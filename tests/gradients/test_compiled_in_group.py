"""Compiled forward gradients and steps of HorizonAdam in a group: graphs, and the exchange between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from group_jobs import ESTIMATED
from launches import Launch

Results = list[dict[str, Any]]


def compare(found: Results, name: str) -> None:
    for process in found:
        plain, compiled = process["compiled_estimates"][name]
        assert torch.equal(compiled, found[0]["compiled_estimates"][name][1])  # the same bits in all processes
        torch.testing.assert_close(compiled, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ESTIMATED)
def test_compiled_calls_are_the_uncompiled_ones(two: Results, name: str) -> None:
    """With uneven shards, a batch of another size in one process, and several steps with one call."""
    compare(two, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATED)
def test_through_the_compiler(launched: Launch, name: str) -> None:
    compare(launched("compiled", 2, by_compiler), name)


def by_compiler() -> dict[str, Any]:
    from functools import partial

    from group_jobs import compiled_estimates

    return {"compiled_estimates": partial(compiled_estimates, by_compiler=True)}


def test_what_goes_wrong_in_one_process_is_known_to_the_others(two: Results) -> None:
    one, other = (found["compiled_faults"] for found in two)
    assert one["not finite"] == other["not finite"] == "nothing was raised, still"
    assert one["raising"].startswith("LostProcess: process 1 raised an error at step 1") and "still" in one["raising"]
    assert other["raising"].startswith("RuntimeError: ") or other["raising"].startswith("TorchRuntimeError: ")
    for found in (one, other):
        assert "the batch has 3 samples and 4 were counted" in found["another size"]
