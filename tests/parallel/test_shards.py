"""Forward gradients and HorizonAdam of many processes: those of the whole batch in one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import jetplane as jp
from jetplane.parallel.shards import Meeting, Shard
from many_processes import (
    COUNT,
    Recurrent,
    batch,
    changing_horizon,
    convex,
    flat,
    forward,
    horizon,
    horizon_in_turns,
    losses,
    network,
    normed,
    seeded,
)

Results = list[dict[str, Any]]

FORWARD = {
    "forward": partial(forward, 30),
    "forward without control": partial(forward, 3, control=False),
    "forward, tokens first": partial(forward, 3, make=lambda: seeded(Recurrent)),
    "forward, weights": partial(forward, 3, estimator="weight", samples=4),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_gradients_are_those_of_the_whole_batch(two: Results, name: str) -> None:
    assert torch.equal(two[0][name], two[1][name])
    torch.testing.assert_close(two[0][name], FORWARD[name](), rtol=0, atol=1e-12)


def test_shards_one_after_the_other_give_the_same_bits(two: Results) -> None:
    found = two[0]["forward without control"][:-1]
    assert torch.equal(found, forward(3, parts=2, control=False))


def test_batch_norms_are_those_of_each_shard(two: Results) -> None:
    found = two[0]["forward, batch norm"]
    assert torch.equal(found, two[1]["forward, batch norm"])
    assert torch.equal(found[:-1], forward(3, parts=2, make=normed, control=False))


def test_steps_of_horizon_adam_are_those_of_the_whole_batch(two: Results) -> None:
    for steps in (1, 12):
        name = f"HorizonAdam {steps}"
        assert torch.equal(two[0][name], two[1][name])
        assert not torch.equal(two[0][name], flat(network()))
    torch.testing.assert_close(two[0]["HorizonAdam 1"], horizon(1), rtol=0, atol=1e-12)
    torch.testing.assert_close(two[0]["HorizonAdam 12"], horizon(12), rtol=0, atol=1e-10)


def test_horizon_adam_that_changes_on_its_way_is_that_of_the_whole_batch(two: Results) -> None:
    name = "HorizonAdam, changed on its way"
    assert torch.equal(two[0][name], two[1][name])
    torch.testing.assert_close(two[0][name], changing_horizon(), rtol=0, atol=1e-10)


def test_several_closures_are_refused_in_a_group(two: Results) -> None:
    assert two[0]["arguments"]["several closures"] == (
        "ValueError: step got 2 closures and there is a process_group; expected one function, for each process has its "
        "part of the batch."
    )


def test_shards_in_turn_give_the_same_bits_of_horizon_adam(two: Results) -> None:
    """One process that computes the shards one after the other, up to each exchange."""
    for found in horizon_in_turns(12, 2):
        assert torch.equal(found, two[0]["HorizonAdam 12"])


@pytest.mark.slow
def test_a_hundred_steps_of_horizon_adam_on_four(four: Results) -> None:
    for other in four[1:]:
        assert torch.equal(four[0]["HorizonAdam"], other["HorizonAdam"])
    assert torch.equal(four[0]["HorizonAdam"], horizon_in_turns(100, 4)[0])
    torch.testing.assert_close(four[0]["HorizonAdam"], horizon(100), rtol=0, atol=1e-9)


def test_another_program_is_refused(two: Results) -> None:
    assert [found["other_program"] for found in two] == [
        "ProcessesDiffer: the losses of process 1 are another program than those of process 0 at call 0, or their "
        "samples lie otherwise; expected the same operations on all processes."
    ] * 2


def test_places_that_do_not_fit_are_refused(two: Results) -> None:
    said = two[0]["arguments"]
    assert said["total"] == (
        "ValueError: total is 12 and there is a process_group, which counts the samples; expected one of them."
    )
    assert said["another size"] == (
        "ValueError: the batch has 3 samples and 4 were counted, as many as at the call before; expected the batch as "
        "arguments of the call, where its size is seen before the passes."
    )
    assert said["offset"] == "ValueError: offset is 11 for 5 of 12 samples in all processes; expected them to fit."


def test_a_part_of_a_batch_needs_its_place() -> None:
    model, (x, y) = convex(), batch()
    estimate = jp.ForwardGradient(model.parameters())
    loss = losses(model, "none")
    with pytest.raises(ValueError, match=r"offset is 3 and total is None; expected both, the place of the first"):
        estimate(loss, x, y, offset=3)
    with pytest.raises(ValueError, match=r"offset is 3 and total 12 for 12 samples; expected them to fit."):
        estimate(loss, x, y, offset=3, total=COUNT)
    with pytest.raises(ValueError, match=r"offset is -1; expected a whole number from 0."):
        estimate(loss, x, y, offset=-1, total=COUNT)
    with pytest.raises(ValueError, match=r"total is 0; expected a whole number from 1."):
        estimate(loss, x, y, offset=0, total=0)
    compiled = jp.ForwardGradient(model.parameters(), compile=True)
    with pytest.raises(ValueError, match=r"offset is 3, total 12 and compile True; expected compile=False for a part"):
        compiled(loss, x[3:], y[3:], offset=3, total=COUNT)
    assert all(p.grad is None for p in model.parameters())


def test_a_linear_layers_part_is_its_exact_part() -> None:
    """Where nothing is noise, by autograd: the parts of a mean over all samples."""
    model, (x, y) = convex(), batch()
    estimate = jp.ForwardGradient(model.parameters())
    loss = losses(model, "none")
    for start, stop in ((0, 5), (5, COUNT)):
        estimate(loss, x[start:stop], y[start:stop], offset=start, total=COUNT)
    other = seeded(lambda: nn.Linear(5, 3))
    torch.autograd.backward(losses(other, "none")(x, y).mean())
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-13)


def test_alone_a_shard_is_the_whole() -> None:
    assert Meeting().shard(4, 10) is None
    assert Meeting(4, 12).shard(4, 10) == Shard(4, 12, 30)
