"""Each contestant takes steps that move what moves, forward-only where it says so."""

from __future__ import annotations

import copy

import pytest
import torch

import jetplane as jp
import tiny_texts
from jetplane_lab.finetuning.contestants import CONTESTANTS, MOVING, moving, one_leaf
from jetplane_lab.finetuning.encoder import classifier
from jetplane_lab.finetuning.entry import Entry, build, losses_of

DATA = tiny_texts.data()
BATCHES = torch.arange(16).view(2, 8)
FEW = {"horizon", "fomoh-kd", "mezo", "adamw-checkpointed"}  # the others are slow to begin


def entry(method: str, kind: str = "all") -> Entry:
    return Entry(method, kind, CONTESTANTS[method].rates[kind][-1], 0, True, tiny_texts.SETTINGS)


@pytest.mark.parametrize("kind", MOVING)
@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in CONTESTANTS]
)
def test_a_contestant_moves_what_moves_and_nothing_else(name: str, kind: str) -> None:
    contestant, model = CONTESTANTS[name], build(entry(name, kind), DATA)
    contestant.prepare(model)
    assert model.training is contestant.dropout
    before = copy.deepcopy(model.state_dict())
    method = contestant.make(model, entry(name, kind).rate, 0, False)
    losses = losses_of(model, DATA.train, not contestant.per_sample)
    with contestant.guarded():
        reports = method.steps(losses, BATCHES)
        if name == "gauss-newton":  # which refuses steps until its damping fits
            method.steps(losses, BATCHES.repeat(2, 1))
    assert reports.loss.shape == (2,) and bool(reports.loss.isfinite().all())
    # one leaf stands for all parameters of a method that knows losses alone; it asks for gradients itself
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved and moved <= names, moved - names
    assert "head.weight" in moved


def test_what_is_called_forward_only_is() -> None:
    def backward() -> None:
        x = torch.ones(1, requires_grad=True)
        (x * x).sum().backward()

    with CONTESTANTS["adamw"].guarded():
        backward()
    with pytest.raises(jp.BackwardPass), CONTESTANTS["mezo"].guarded():
        backward()
    assert {name for name, one in CONTESTANTS.items() if one.backward} == {"adamw", "adamw-checkpointed"}


def test_checkpoints_change_no_number() -> None:
    pieces = DATA.train.pieces[:4]
    plain, checkpointed = (classifier(DATA.start, 2, 0).double() for _ in range(2))
    CONTESTANTS["adamw"].prepare(plain)
    CONTESTANTS["adamw-checkpointed"].prepare(checkpointed)
    for model in (plain, checkpointed):
        torch.manual_seed(0)  # of dropout, which the second pass of a checkpoint draws again
        model(pieces).sum().backward()
    for ours, theirs in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        if ours.grad is not None:
            assert theirs.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_one_leaf_moves_the_model_and_a_state_goes_into_it() -> None:
    model = classifier(DATA.start, 2, 0)
    state = {name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()}
    flat = one_leaf(model)
    assert flat.numel() == sum(leaf.numel() for leaf in moving(model)) and flat.requires_grad
    model.load_state_dict(state)
    assert bool((flat == 2).all()), "a checkpoint must reach the leaf"
    with torch.no_grad():
        flat.fill_(3.0)
    assert all(bool((leaf == 3).all()) for leaf in model.parameters())


def test_rates_are_for_both_kinds_and_a_choice_that_is_taken_over_exists() -> None:
    for name, contestant in CONTESTANTS.items():
        assert set(contestant.rates) == set(MOVING), name
        if contestant.rates_of is not None:
            assert contestant.rates == CONTESTANTS[contestant.rates_of].rates
