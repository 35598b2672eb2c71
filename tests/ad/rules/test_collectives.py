"""Collectives inside a program, against one process that plays all of them and differentiates twice by backprop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from collective_jobs import FORMS, PROGRAMS, Played, expected, expected_others, expected_rarer, numbers, reduced
from jetplane.ad import rules
from jetplane.ad.algebra.registry import Kind, plan

Results = list[dict[str, Any]]


def assert_near(found: Tensor, wanted: Tensor) -> None:
    scale = float(wanted.abs().max()) if wanted.numel() else 1.0
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12 * max(1.0, scale))


def compare(found: Results, name: str) -> None:
    wanted = expected(name, len(found))
    for form in FORMS:
        for mine, process in zip(wanted, found, strict=True):
            for part, value in mine.items():
                assert_near(process[f"{name}, {form}"][part], value)


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_processes_find_what_one_does(pair: Results, name: str) -> None:
    compare(pair, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_four_processes_find_what_one_does(quartet: Results, name: str) -> None:
    compare(quartet, name)


def test_other_derivatives_of_a_program_with_collectives(pair: Results) -> None:
    for rank, process in enumerate(pair):
        for name, wanted in expected_others(2, rank).items():
            assert_near(process["other_derivatives"][name], wanted)


def test_rarer_collectives_have_the_derivatives_that_are_worked_out_by_hand(pair: Results) -> None:
    for rank, process in enumerate(pair):
        for found, wanted in zip(process["rarer"], expected_rarer(2, rank), strict=True):
            assert_near(found, wanted)


def test_every_collective_of_torch_has_a_rule_or_is_refused() -> None:
    """One that returns a handle alone would otherwise be run without its tangents, and nobody would know."""
    rules.load()
    harmless = {"c10d::barrier", "c10d::monitored_barrier_", "c10d::check_for_nan"}
    pairwise = {"_c10d_functional::isend", "_c10d_functional::irecv", "_c10d_functional::batch_p2p_ops"}
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace not in ("c10d", "_c10d_functional") or schema.name in harmless:
            continue
        op = getattr(getattr(getattr(torch.ops, namespace), name), schema.overload_name or "default")
        step = plan(op)
        if schema.name in pairwise:
            assert step.kind is Kind.MISSING  # they return tensors, so that they are refused
        else:
            assert step.kind is not Kind.MISSING, schema.name
            assert step.traits.meets or step.kind is Kind.VIEW or step.family == "refused", schema.name


def test_processes_that_disagree_are_told(pair: Results) -> None:
    for rank, process in enumerate(pair):
        said, other = process["disagreements"], 1 - rank
        mine, its = (("1 and 1", "K = 2 directions and 3"), ("2 and 3", "K = 1 directions and 1"))[rank]
        assert said["K"] == (
            f"ProcessesDiffer: process {other} of the group carries {its} second-order rows at "
            f"_c10d_functional.all_reduce.default, and process {rank} {mine}; expected the same on all processes."
        )
        op = ("all_reduce", "broadcast")[rank]
        assert said["order"] == (
            f"ProcessesDiffer: process {other} of the group is not at _c10d_functional.{op}.default, where process "
            f"{rank} is; expected the same collectives in the same order, inside a pass, on all processes."
        )
        assert "second-order rows at" in said["early and late"]


def test_a_process_that_does_not_come_is_not_waited_for_longer_than_the_timeout(pair: Results) -> None:
    said = pair[0]["absent"]
    assert said.startswith("LostProcess: _c10d_functional.all_reduce.default inside the program failed (")
    assert "2000ms" in said
    assert said.endswith(
        "expected all processes of its group to run the same collectives in the same order, inside a pass. How long "
        "one waits is the timeout of the group."
    )


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("send", "c10d.send.default is given a perturbed tensor, and tangents do not travel from one process to one"),
        ("coalesced maximum", "_c10d_functional.all_reduce_coalesced.default with the reduction 'max' has no rule"),
        ("shapes", "c10d.allgather_ of tensors of several shapes has no rule"),
        ("other shapes", "c10d.reduce_scatter_ of tensors of several shapes has no rule"),
        ("back", "a backward pass goes through the rows of a collective, whose gradients would have to travel back"),
    ],
)
def test_what_has_no_rule_is_refused(pair: Results, case: str, message: str) -> None:
    assert all(message in process["disagreements"][case] for process in pair)


def test_a_forward_gradient_behind_a_collective_is_refused_and_one_along_weights_unbiased(pair: Results) -> None:
    for process in pair:
        said = process["disagreements"]["ForwardGradient"]
        assert "is a collective, behind which the noise of one process is in the losses of others" in said
    theta = (numbers(6, 3, seed=5) / 2).requires_grad_()
    losses = reduced(Played(2), theta)
    (gradient,) = torch.autograd.grad(torch.stack(losses).mean(), theta)
    found = pair[0]["weighed"]
    assert torch.equal(found, pair[1]["weighed"])
    # the mean of 400 terms (g . v) v, whose variance is |g|^2 + g_i^2 at each entry
    deviation = ((gradient.square().sum() + gradient.square()) / 400).sqrt()
    assert ((found - gradient) / deviation).abs().max() < 4
