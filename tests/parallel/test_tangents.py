"""Processes that share the tangents of forward gradients: the numbers are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from group_jobs import TANGENTS
from many_processes import flat, network

Results = list[dict[str, Any]]


@pytest.mark.parametrize("name", TANGENTS)
def test_shared_tangents_are_those_of_one_process(two: Results, name: str) -> None:
    ours, theirs = (found["tangents"][name] for found in two)
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(ours, TANGENTS[name](), rtol=0, atol=1e-12)
    assert not torch.equal(ours[: len(flat(network()))], flat(network()))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TANGENTS if "norm" not in name])
def test_data_and_tangents_at_once(four: Results, name: str) -> None:
    for other in four[1:]:
        assert torch.equal(four[0]["tangents"][name], other["tangents"][name])
    torch.testing.assert_close(four[0]["tangents"][name], TANGENTS[name](), rtol=0, atol=1e-10)


def test_what_cannot_be_shared_is_refused(two: Results) -> None:
    for found in two:
        said = found["shared"]
        assert said["tangents"] == (
            "ValueError: 2 processes are to share 1 tangents; expected as many tangents as processes at least, by "
            "samples=, or fewer processes for them."
        )
        assert said["other samples"].startswith(
            "ProcessesDiffer: process 1 of those that share tangents has 12 losses of mean "
        )
        assert said["other count"].startswith(
            "ProcessesDiffer: process 1 of those that share tangents has 4 of 44 numbers each at call 0, and process 0 "
        )


def test_a_process_that_fails_is_named(two: Results) -> None:
    assert two[0]["shared"]["failing"].startswith("LostProcess: process 1 raised an error at call 0;")
    assert two[1]["shared"]["failing"] == "KeyError: 'a broken disk'"


@pytest.mark.slow
def test_all_of_a_mesh_hear_of_a_process_that_fails(four: Results) -> None:
    assert four[3]["failing"] == ["KeyError: 'a broken disk'"] * 2
    for found in four[:3]:
        assert all(said.startswith("LostProcess: process") for said in found["failing"])
    assert all("process 3 raised an error at call 1" in said for said in four[2]["failing"] + four[1]["failing"])
