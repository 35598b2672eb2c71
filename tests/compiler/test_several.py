"""Several calls of one captured program."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from jetplane.compiler.several import Several, alone, entries, stacked


def test_the_first_call_is_what_dynamo_sees() -> None:
    xs, ys, word = torch.arange(6.0).reshape(3, 2), torch.arange(3), "a word"
    some = Several.of((xs, ys, word), 3)
    other = torch.zeros(1)
    assert some.first[2] == word and torch.equal(some.first[0], xs[0])
    fed = some.fed([other, some.first[1], some.first[0]])
    assert fed.keys() == {1, 2} and fed[1] is ys and fed[2] is xs


def test_what_all_calls_gave_is_found_by_what_the_first_gave() -> None:
    some = Several.of((torch.zeros(2, 1),), 2)
    outputs = [torch.arange(4.0).reshape(2, 2), torch.arange(2.0)]
    once = some.keep(outputs)
    assert torch.equal(once[0], outputs[0][0]) and some.every(once[1]) is outputs[1] and some.every(7) == 7


def test_tensors_in_dicts_and_lists_are_batches_and_parameters_are_not() -> None:
    weight, x = torch.ones(2, requires_grad=True), torch.ones(3)
    (batch,) = alone(({"x": [x], "weight": weight},))
    assert batch["x"][0].shape == (1, 3) and batch["weight"] is weight
    some = Several.of((batch,), 1)
    (first,) = some.first
    fed = some.fed([first["weight"], first["x"][0]])
    assert first["weight"] is weight and torch.equal(first["x"][0], x) and fed.keys() == {1}


def test_a_batch_alone_is_the_only_one_of_several() -> None:
    x, word = alone((torch.ones(2), "word"))
    assert x.shape == (1, 2) and word == "word" and entries(len, (torch.zeros(4, 2), torch.zeros(4))) == 4


@pytest.mark.parametrize(
    ("closure", "batches", "error", "message"),
    [
        (3, (torch.ones(2),), TypeError, "steps got int; expected a function of a batch that returns the loss."),
        (len, (torch.ones(2), torch.ones(3)), ValueError, "the batches are [(2,), (3,)]; expected tensors with"),
        (len, (torch.ones(0),), ValueError, "the batches have no entries; expected at least one step."),
    ],
)
def test_batches_that_are_none(closure: Any, batches: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        entries(closure, batches)


def test_what_calls_gave_is_stacked_or_listed() -> None:
    assert stacked(torch.ones(2), torch.zeros(2)).shape == (2, 2) and stacked("a", "b") == ["a", "b"]
