"""Processes that share directions, alone and together with others that have other samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from group_jobs import SHARING
from many_processes import convex, flat, search

Results = list[dict[str, Any]]


@pytest.mark.parametrize("name", SHARING)
def test_shared_directions_are_those_of_one_process(two: Results, name: str) -> None:
    ours, theirs = (found["shared"][name] for found in two)
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(ours, search(name, 3), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING)
def test_data_and_directions_at_once(four: Results, name: str) -> None:
    for other in four[1:]:
        assert torch.equal(four[0][f"both, {name}"], other[f"both, {name}"])
    torch.testing.assert_close(four[0][f"both, {name}"], search(name, 12), rtol=0, atol=1e-10)


def test_what_cannot_be_shared_is_refused(two: Results) -> None:
    for found in two:
        said = found["shared"]
        assert said["late"] == (
            "ValueError: 2 processes are to share the directions of a curvature that begins at the loss, which needs "
            "all of them in one pass; expected the exact curvature, none, the empirical Fisher, or data alone."
        )
        assert said["K"] == (
            "ValueError: 2 processes are to share a plane of K = 1, which is 1 passes at most; expected more "
            "directions, or fewer processes for them."
        )
        assert said["names"] == (
            "ValueError: process_group is a DeviceMesh with the dimensions ('data',); expected ('data', 'directions')."
        )
        assert said["few"] == "ValueError: process_group is a DeviceMesh of 1 processes; expected all 2 of them."


def test_other_batches_and_errors_are_named(two: Results) -> None:
    for found in two:
        assert found["shared"]["other batch"].startswith(
            "ProcessesDiffer: process 1 of those that share directions has 1 losses of mean "
        )
        assert found["shared"]["other chunks"].endswith("; expected the same chunk_size, or memory, in both.")
        assert (
            " of those that share directions has 10 passes to share at step 0, and process 0 3"
            in (found["shared"]["other chunks"])
        )
        assert torch.equal(found["shared"]["still"], flat(convex()))
    assert two[0]["shared"]["raising"] == (
        "LostProcess: process 1 raised an error at step 0; what went wrong is in the message there."
    )
    assert two[1]["shared"]["raising"] == "KeyError: 'a broken disk'"
