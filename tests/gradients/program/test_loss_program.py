"""The program whose gradient is wanted: what it may return, and what makes two calls alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jetplane as jp
from classifiers import X
from jetplane.gradients.program.loss_program import LossProgram

PARAMETER = nn.Parameter(torch.ones(4, 3))
OTHER = nn.Parameter(torch.ones(3))

LOSSES: list[tuple[type[Exception], str, Callable[[Tensor], Any]]] = [
    (TypeError, "loss_fn returned float 1.0; expected a tensor of losses", lambda x: 1.0),
    (TypeError, r"tuple \(a pair of a result and aux needs has_aux=True\); expected a tensor", lambda x: (x, x)),
    (ValueError, r"returned no loss, \(0,\); expected at least one sample", lambda x: (x @ PARAMETER).sum(1)[:0]),
    (ValueError, r"shape \(\); expected one loss for each sample", lambda x: (x @ PARAMETER).sum()),
    (ValueError, r"torch.int64 of shape \(8,\); expected one loss", lambda x: (x @ PARAMETER).argmax(1)),
]


@pytest.mark.parametrize(("error", "message", "program"), LOSSES, ids=[message for _, message, _ in LOSSES])
def test_refused_programs(error: type[Exception], message: str, program: Callable[[Tensor], Any]) -> None:
    with pytest.raises(error, match=message):
        jp.forward_gradient(program, {"weight": PARAMETER, "other": OTHER}, X)


@pytest.mark.parametrize(
    ("batch", "alike"),
    [
        ((torch.ones(8, 4), 2), True),  # numbers may differ
        ((torch.ones(7, 4), 1), False),
        ((torch.ones(8, 4, dtype=torch.float64), 1), False),
        ((torch.ones(8, 4), 1.0), False),
        (((torch.ones(8, 4), 1),), False),
    ],
)
def test_batches_of_the_same_form_are_alike(batch: tuple[Any, ...], alike: bool) -> None:
    first, other = LossProgram(torch.sum, (X, 1), False), LossProgram(torch.sum, batch, False)
    assert (first.form == other.form) is alike


def test_what_comes_with_the_losses_is_handed_on() -> None:
    losses, aux = LossProgram(lambda x: (x.sum(1), "seen"), (X,), True)()
    assert torch.equal(losses, X.sum(1)) and aux == "seen"
    assert LossProgram(lambda x: x.sum(1), (X,), False)()[1] is None
