"""Which calls draw random numbers, by whether they move torch's random state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import jetplane as jp
from jetplane.ad.draws import draws
from jetplane.gradients.plan.noise_plan import NoisePlan

X = torch.ones(2, 1, 3, 4)


class Noted(TorchDispatchMode):
    """Whether any operation is said to draw."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or draws(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.scaled_dot_product_attention(X, X, X),
        lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.5),
        lambda: F.scaled_dot_product_attention(X, X, X, is_causal=True),
        lambda: F.dropout(X, 0.5),
        lambda: F.dropout(X, 0.5, training=False),
        lambda: F.rrelu(-X, training=True),
        lambda: torch.randn(2),
        lambda: X.clone().normal_(),
        lambda: torch.bernoulli(X / 2),
        lambda: X.exp(),
    ],
)
def test_what_draws_moves_the_random_state(call: Callable[[], Tensor]) -> None:
    before = torch.get_rng_state()
    with Noted() as mode:
        call()
    assert mode.found == (not torch.equal(before, torch.get_rng_state()))


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "expected"),
    [
        (F.scaled_dot_product_attention, (X, X, X), {}, False),
        (F.scaled_dot_product_attention, (X, X, X, None, 0.0), {}, False),
        (F.scaled_dot_product_attention, (X, X, X), {"dropout_p": 0.1}, True),
        (F.scaled_dot_product_attention, (X, X, X), {"dropout_p": "a value of the graph"}, True),
        (F.dropout, (X,), {}, True),
        ("normal_", (X,), {}, True),
        ("exp", (X,), {}, False),
        (torch.ops.aten._cudnn_rnn.default, (), {"dropout": 0.0}, False),
        (torch.ops.aten._cudnn_rnn.default, (), {"dropout": 0.2}, True),
        (torch.ops.aten.native_dropout.default, (X, 0.5, True), {}, True),
    ],
)
def test_functions_methods_and_operations_that_are_not_called(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: bool
) -> None:
    assert draws(target, args, kwargs) == expected


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_transformer_without_dropout_can_be_replayed(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[NoisePlan] = []
    made = NoisePlan.__post_init__
    monkeypatch.setattr(NoisePlan, "__post_init__", lambda self: (plans.append(self), made(self))[1])
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
    jp.forward_gradient(lambda x: model(x).square().sum((1, 2)), model.parameters(), torch.randn(4, 3, 8), samples=1)
    assert [plan.random for plan in plans] == [dropout > 0] * len(plans) and plans
