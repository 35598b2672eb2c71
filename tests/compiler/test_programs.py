"""Captured programs: kept by what they are, given up with one warning."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from jetplane.compiler.capture import Graph, Run
from jetplane.compiler.programs import Programs
from jetplane.errors import CaptureFailed


def build(graph: Graph, inputs: Sequence[Tensor]) -> Run:
    return lambda tensors: graph(tensors)


def plain(function: Any) -> Any:
    return function


def test_a_program_gives_what_it_returns() -> None:
    programs, x = Programs(build), torch.ones(3)
    assert torch.equal(programs.call(lambda x: x + 1, plain, None, (x,), False)[0], x + 1)  # type: ignore[index]
    loss, aux = programs.call(lambda x: (x.sum(), {"seen": x * 2}), plain, None, (x,), True)  # type: ignore[misc]
    assert float(loss) == 3 and torch.equal(aux["seen"], 2 * x)


def test_one_that_cannot_be_captured_is_said_once() -> None:
    programs, x = Programs(build), torch.ones(3)

    def branching(x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x

    with pytest.warns(UserWarning, match="branching cannot be compiled and is run as it is") as said:
        assert programs.call(branching, plain, None, (x,), False) is None
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert programs.call(branching, plain, None, (x,), False) is None
    assert programs.gave_up(branching, None, (x,), False) and not programs.gave_up(branching, "other", (x,), False)
    programs.clear()
    assert not programs.gave_up(branching, None, (x,), False)


def test_a_batch_that_was_wrong_does_not_spoil_the_program() -> None:
    programs, right, wrong = Programs(build), torch.ones(2, 3), torch.ones(2, 4)

    def product(x: Tensor) -> Tensor:
        return x @ torch.ones(3)

    with pytest.warns(UserWarning, match="product cannot be compiled and is run as it is"):
        assert programs.call(product, plain, None, (wrong,), False) is None  # and there the error is what it is
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert programs.call(product, plain, None, (wrong,), False) is None
        (found,) = programs.call(product, plain, None, (right,), False) or (None,)
        assert torch.equal(found, torch.full((2,), 3.0)) and not programs.gave_up(product, None, (right,), False)
        assert programs.call(product, plain, None, (torch.ones(2, 5),), False) is None
        assert programs.call(product, plain, None, (right,), False) is not None  # what works stays in use
    assert programs.gave_up(product, None, (torch.ones(4, 3),), False)  # and nothing else is tried


def test_what_building_refuses_is_given_up_too() -> None:
    def refusing(graph: Graph, inputs: Sequence[Tensor]) -> Run:
        raise CaptureFailed("it is not to be")

    with pytest.warns(UserWarning, match="it is not to be"):
        assert Programs(refusing).call(lambda x: x + 1, plain, None, (torch.ones(1),), False) is None


@torch._dynamo.config.patch(recompile_limit=2)
def test_batches_of_many_lengths_are_all_captured() -> None:
    captured: list[torch.Size] = []

    def counting(graph: Graph, inputs: Sequence[Tensor]) -> Run:
        captured.append(inputs[0].shape)
        return lambda tensors: graph(tensors)

    programs, func = Programs(counting), lambda x: x.sum() + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (3, 4, 5, 6, 7, 4, 7, 3):
            (found,) = programs.call(func, plain, None, (torch.ones(length),), False)  # type: ignore[misc]
            assert float(found) == length + 1
    assert captured == [torch.Size([length]) for length in (3, 4, 5, 6, 7)]


@torch._dynamo.config.patch(recompile_limit=2)
def test_numbers_that_keep_changing_open_no_further_set() -> None:
    programs, x = Programs(build), torch.ones(3)

    def scaled(x: Tensor, number: float) -> Tensor:
        return x.sum() * number

    for number in (1.5, 2.5):
        assert programs.call(scaled, plain, None, (x, number), False) is not None
    with pytest.warns(UserWarning, match="is compiled for as many kinds of inputs"):
        assert programs.call(scaled, plain, None, (x, 3.5), False) is None
