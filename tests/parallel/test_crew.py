"""Processes are compared before the first step and every few steps, and batches counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jetplane as jp
from jetplane import optim
from jetplane.parallel.crew import Crew
from many_processes import batch, convex, losses

Results = list[dict[str, Any]]

FIRST = (
    "ProcessesDiffer: process 1 differs from process 0 at the first step of {}: {}; expected the same on all processes."
)
DIFFERENT = {
    "seed": ("FoMoHKD", "the seed is 1 there, and 0 on process 0"),
    "K": ("FoMoHKD", "K is 3 there, and 2 on process 0"),
    "shape": ("FoMoHKD", "the shape of parameter 0 is (4, 5) there, and (3, 5) on process 0"),
    "other_dtype": ("FGD", "the dtype of parameter 0 is torch.float32 there, and torch.float64 on process 0"),
    "other_version": ("FoMoHKD", "the version of jetplane is 9.1 there, and 9.0 on process 0"),
    "other_horizon": ("HorizonAdam", "the seed is 1 there, and 0 on process 0"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_processes_that_differ_are_refused_at_the_first_step(two: Results, name: str) -> None:
    assert [found[name] for found in two] == [FIRST.format(*DIFFERENT[name])] * 2


def test_processes_that_would_exchange_at_other_steps_are_refused(two: Results) -> None:
    for found in two:
        assert found["other_exchanges"] == [
            FIRST.format("FoMoHKD", "check_every is 2 there, and 1 on process 0"),
            FIRST.format("FoMoHKD", "process_group is 'Quorum' there, and 'ProcessGroup' on process 0"),
        ]


def test_copies_stay_in_their_group(two: Results) -> None:
    for found in two:
        assert found["copied"] == [True] * 5


def test_values_that_differ_are_named_by_their_parameter(two: Results) -> None:
    for found in two:
        assert "at the first step of FoMoHKD: the hash of parameter 1 is " in found["other_values"]
        assert "solver is SaddleFree(floor=1e-08) there" in found["solver"]


def test_parameters_that_drift_apart_are_found(two: Results) -> None:
    for found in two:
        assert found["drifted"] == (
            "ProcessesDiffer: the parameters of process 1 differ from those of process 0 since one of the steps 5 to "
            "8; expected the same on all processes. check_every=1 looks after every step."
        )


def test_closures_without_a_batch_need_a_weight(two: Results) -> None:
    said = (
        "ValueError: step got {} without a batch and no weight; expected weight=, the number of samples (or tokens) "
        "that the closure's mean is over, for the means of 2 processes are averaged by it."
    )
    for found in two:
        assert found["arguments"]["no batch"] == said.format("a closure")
        assert found["arguments"]["a list"] == said.format("closures")


def test_weights_are_numbers(two: Results) -> None:
    said = two[0]["arguments"]
    assert said["weights"] == "ValueError: weight is [1.0] for 2 closures; expected one number for each."
    assert said["text"] == "TypeError: weight is 'many'; expected a number, or one for each closure of a list."
    assert said["negative"] == "ValueError: weight is -1; expected a finite number from 0."


def test_what_cannot_be_captured_is_refused(two: Results) -> None:
    said = two[0]["arguments"]
    assert said["compile"] == (
        "ValueError: compile is True and process_group is a DeviceMesh, whose processes run several passes of a plane; "
        "expected compile=False, or a ProcessGroup."
    )
    assert said["capturable"] == (
        "ValueError: capturable is True and there is a process_group; the exchange between processes cannot be "
        "captured, expected capturable=False."
    )
    assert (
        said["compiled estimate"]
        == said["compiled adam"]
        == (
            "ValueError: compile is True and process_group is a DeviceMesh whose processes share tangents; expected "
            "compile=False, or a ProcessGroup."
        )
    )


@pytest.mark.parametrize("value", [0, True, 1.5])
def test_how_often_to_look_is_a_whole_number(value: Any) -> None:
    for make in (optim.FGD, optim.HorizonAdam, jp.ForwardGradient):
        with pytest.raises(ValueError, match=rf"check_every is {value!r}; expected a positive whole number of steps"):
            make(convex().parameters(), check_every=value)


def test_sharded_parameters_are_refused_by_name(two: Results) -> None:
    for found in two:
        for said in found["refused"].values():
            assert "is a sharded parameter (DTensor), as FSDP's fully_shard and tensor parallelism make them" in said
            assert "expected parameters that every process has whole, as with DistributedDataParallel" in said


def test_alone_nothing_is_said() -> None:
    crew, model = Crew(None, 1, "FGD"), convex()
    crew.begin(lambda: {}, 0, list(model.parameters()), ["weight", "bias"])
    crew.check(1, list(model.parameters()))
    assert crew.quiet
    crew.again()
    assert not crew.quiet


def test_it_is_logged_once_what_a_batch_counts(caplog: pytest.LogCaptureFixture) -> None:
    crew = Crew(None, None, "FGD")
    with caplog.at_level("INFO", logger="jetplane"):
        assert [crew._counts([{"x": torch.ones(3, 2)}, torch.ones(5)], 1) for _ in range(2)] == [[3.0], [3.0]]
    assert [record.getMessage() for record in caplog.records] == [
        "A batch counts by the first axis of its first tensor, here 3; step(..., weight=) says it otherwise."
    ]


def test_a_copy_of_an_optimizer_steps_on() -> None:
    import copy

    model, (x, y) = convex(), batch()
    opt = optim.FoMoHKD(model.parameters(), 0.3)
    opt.step(losses(model, "mean"), x, y)
    model, opt = copy.deepcopy((model, opt))
    assert torch.isfinite(opt.step(losses(model, "mean"), x, y))
