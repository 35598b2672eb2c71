"""Compiled forward gradients: unbiased as the eager ones are, with the same noise, random numbers and buffers."""

from __future__ import annotations

import pytest
from torch.nn import functional as F

from exactness import CASES, LABELS, Case, check_exact

# What Dynamo, or a trace, cannot take: these are run as they are.
NOT_CAPTURED = {
    "batch norms and dropout": "data-dependent",  # a norm with momentum=None counts its calls on the host
    "batch norm over steps, as many as samples": "Changed",
    "lstm, sequence first": "RNN, GRU, or LSTM",
    "lstm, batch first": "RNN, GRU, or LSTM",
    "gru": "RNN, GRU, or LSTM",
    "rnn, as long as the batch": "RNN, GRU, or LSTM",
    "experts": "data-dependent",
}


@pytest.mark.usefixtures("traced")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # of a checkpoint, rightly
@pytest.mark.parametrize("case", [case for case in CASES if case.name not in NOT_CAPTURED], ids=lambda case: case.name)
def test_a_compiled_estimate_with_all_coordinates_is_the_gradient(case: Case) -> None:
    model = case.model().double()

    def losses(x, y):  # type: ignore[no-untyped-def]
        return F.cross_entropy(model(x), y, reduction="none")

    check_exact(model, losses, case.data(), LABELS, compile=True)
