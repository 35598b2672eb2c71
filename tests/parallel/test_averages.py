"""Steps that processes take together: the same bits everywhere, as one process with the shards as closures, and as the
whole batch in one closure up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jetplane import optim
from jetplane.parallel.averages import Averages, Weighted
from many_processes import COUNT, MORE, SEARCHES, batch, convex, flat, losses, message, network, search, seeded

Results = list[dict[str, Any]]


@pytest.mark.parametrize("name", SEARCHES | MORE)
def test_processes_have_the_same_bits(two: Results, name: str) -> None:
    for steps in (1, 12):
        assert torch.equal(two[0][f"{name} {steps}"], two[1][f"{name} {steps}"])
        assert not torch.equal(two[0][f"{name} {steps}"], flat(convex()))  # something was done


@pytest.mark.parametrize("name", SEARCHES | MORE)
def test_shards_as_closures_give_the_same_bits(two: Results, name: str) -> None:
    assert torch.equal(two[0][f"{name} 12"], search(name, 12, parts=2))


@pytest.mark.parametrize("name", SEARCHES | MORE)
def test_the_whole_batch_gives_the_same_step(two: Results, name: str) -> None:
    # the noise of the slope, the Fisher matrix and all decisions are those of all samples
    torch.testing.assert_close(two[0][f"{name} 1"], search(name, 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(two[0][f"{name} 12"], search(name, 12), rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHES)
def test_a_hundred_steps_of_four(four: Results, name: str) -> None:
    for other in four[1:]:
        assert torch.equal(four[0][name], other[name])
    assert torch.equal(four[0][name], search(name, 100, parts=4))
    torch.testing.assert_close(four[0][name], search(name, 100), rtol=0, atol=1e-9)


def test_a_parameter_that_one_process_uses_moves_on_all(two: Results) -> None:
    assert torch.equal(two[0]["unused"], two[1]["unused"])
    other = seeded(lambda: nn.Linear(3, 3))
    assert not torch.equal(two[0]["unused"][-12:], flat(other))


def test_a_process_without_samples_counts_nothing(two: Results) -> None:
    assert torch.equal(two[0]["empty"], two[1]["empty"])
    torch.testing.assert_close(two[0]["empty"], search("FoMoHKD", 3), rtol=0, atol=1e-12)


def test_modules_in_distributed_data_parallel(two: Results) -> None:
    for name, found in two[0]["wrapped"].items():
        assert torch.equal(found, two[1]["wrapped"][name])
    torch.testing.assert_close(two[0]["wrapped"]["FoMoHKD"], search("FoMoHKD", 3), rtol=0, atol=1e-12)


def test_the_journal_of_each_process_replays_its_steps(two: Results) -> None:
    assert [found["journaled"] for found in two] == [[6, [True] * 3]] * 2


def test_who_has_numbers_that_are_not_finite_is_named(two: Results) -> None:
    for found in two:
        status, stalled, still, adams, other, heard = found["nonfinite"]
        assert (status, adams) == ("NONFINITE", "NONFINITE")
        assert torch.equal(still, flat(convex())) and torch.equal(other, flat(network()))
        assert "OptimizationStalled" in stalled and "The numbers of process 1 were not finite." in stalled
        assert [said for said in heard if "not finite" in said] == [
            "The numbers of process 1 are not finite at step 0.",
            "The numbers of process 1 are not finite at step 1.",
            "The losses of process 0 are not finite at call 0.",
        ]


def test_a_step_that_no_process_has_samples_for_is_refused(two: Results) -> None:
    for found in two:
        assert found["arguments"]["nobody"] == (
            "ValueError: the weights of all processes are zero at step 1; expected one that is not."
        )


def test_a_rate_that_differs_is_refused(two: Results) -> None:
    for found in two:
        assert found["other_rate"] == (
            "ProcessesDiffer: process 1 differs from process 0 at step 1: lr is [1.3, 1.3] there, and [0.3, 0.3] on "
            "process 0; expected the same on all processes."
        )


def test_weights_of_a_list_of_closures() -> None:
    """The mean is that of all samples, by autograd."""
    (x, y), model = batch(), convex()
    loss = losses(model, "mean")
    opt = optim.FoMoHBP(model.parameters(), 0.0)
    found = opt.step([lambda: loss(x[:5], y[:5]), lambda: loss(x[5:], y[5:])], weight=[5, COUNT - 5])
    whole = loss(x, y)
    torch.testing.assert_close(found, whole.detach(), rtol=1e-14, atol=0)
    gradient = torch.autograd.grad(whole, list(model.parameters()))
    square = sum(part.square().sum() for part in gradient)
    torch.testing.assert_close(opt.report.slope, square.reshape(1), rtol=1e-13, atol=0)


def test_closures_that_count_the_same_need_no_weights() -> None:
    found = Averages().loss([torch.tensor(1.0), torch.tensor(2.0)])
    assert torch.equal(found, torch.tensor(1.5)) and torch.equal(found, Weighted([2.0, 2.0], False).loss(_two()))


def _two() -> list[Tensor]:
    return [torch.tensor(1.0), torch.tensor(2.0)]


def test_one_closure_with_a_weight_is_the_step_without() -> None:
    (x, y), one, other = batch(), convex(), convex()
    optim.FoMoHKD(one.parameters(), 0.3).step(losses(one, "mean"), x, y, weight=7)
    optim.FoMoHKD(other.parameters(), 0.3).step(losses(other, "mean"), x, y)
    assert torch.equal(flat(one), flat(other))


def test_a_weight_of_nothing_is_refused_alone_too() -> None:
    (x, y), model = batch(), convex()
    opt = optim.FGD(model.parameters())
    said = message(lambda: opt.step(lambda x, y: F.cross_entropy(model(x), y), x, y, weight=0))
    assert said == "ValueError: weight is 0; expected one that is not zero."
