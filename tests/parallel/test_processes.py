"""What processes say to each other, and who is named when one is not heard from."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from group_jobs import SUMMED
from jetplane import optim
from jetplane.parallel.processes import Processes, processes_of
from many_processes import convex

Results = list[dict[str, Any]]


def test_sums_are_those_in_the_order_of_ranks(two: Results) -> None:
    parts = [[torch.linspace(-1, 1, n, dtype=dtype) / 3 + rank * 0.1 for n, dtype in SUMMED] for rank in range(2)]
    for found in two:
        for total, one, other in zip(found["sums"], *parts, strict=True):
            assert torch.equal(total, one + other)


def test_a_process_that_raises_is_named(two: Results) -> None:
    places = ["step 0", "step 0, the loss at its end", "step 0, its gradient", "call 0", "the look along the path"]
    assert two[0]["raising"] == [
        f"LostProcess: process 1 raised an error at {place}; what went wrong is in the message there."
        for place in places
    ]
    assert two[1]["raising"] == ["KeyError: 'a broken disk'"] * 5


def test_a_solver_that_raises_is_told_to_all(two: Results) -> None:
    assert two[0]["leading"] == "ZeroDivisionError: a broken solver"
    assert two[1]["leading"] == (
        "LostProcess: process 0 raised an error at step 0; what went wrong is in the message there."
    )


def test_a_process_that_hangs_is_named(two: Results) -> None:
    said = two[0]["hanging"]
    assert said.startswith("LostProcess: process 1 is gone, or did not answer in time, at step 1 (")
    assert "5000ms" in said and "expected all 2 processes to take every step." in said


def test_a_process_that_is_gone_is_named(two: Results) -> None:
    assert two[0]["dying"].startswith("LostProcess: process 1 is gone, or did not answer in time, at step 1 (")


def test_without_a_group_it_is_said_once_that_there_are_others(two: Results) -> None:
    for found in two:
        assert found["alone"] == [
            f"2 processes are initialised and {name} has process_group=None: each process steps by itself, and "
            "parameters will differ between them where batches do. Expected "
            "process_group=torch.distributed.group.WORLD for steps that all take together."
            for name in ("FGD", "HorizonAdam")
        ]


def test_a_group_stays_the_same_in_copies_and_is_not_pickled(two: Results) -> None:
    one = object.__new__(Processes)
    assert copy.deepcopy(one) is one
    assert two[0]["arguments"]["pickle"] == (
        "TypeError: a process group cannot be pickled; expected state_dict() of what uses it, and process_group= in "
        "the process that goes on."
    )


def test_what_is_no_group_is_refused() -> None:
    assert processes_of(None) is None
    with pytest.raises(TypeError, match=r"process_group is str; expected a ProcessGroup such as torch.distributed"):
        optim.FGD(convex().parameters(), process_group="world")


def test_a_process_outside_of_the_group_is_told(two: Results) -> None:
    said = "ValueError: this process is not in process_group; expected a group that it is a member of."
    assert two[1]["arguments"]["not a member"] == said


def test_what_gloo_holds_behind_an_exchange_is_waited_for(two: list[dict[str, Any]]) -> None:
    """Else a process that ends is aborted now and then: its thread would ask Python, which is gone, for a lock."""
    assert all(found["let_go"][1] == 0 for found in two) and sum(found["let_go"][0] for found in two) > 0
