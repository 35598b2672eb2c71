"""Passes are counted with one counter, and bytes from live tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tiny_texts
from jetplane_lab.finetuning.contestants import CONTESTANTS
from jetplane_lab.finetuning.entry import Entry
from jetplane_lab.finetuning.step_cost import held_by, passes_of, peak_of, seconds_of
from jetplane_lab.methods.backprop import Backprop
from jetplane_lab.training.memory import Peak

DATA = tiny_texts.data()


def passes(method: str, kind: str = "all") -> float:
    entry = Entry(method, kind, CONTESTANTS[method].rates[kind][0], 0, True, tiny_texts.SETTINGS)
    return passes_of(entry, DATA)


def test_passes_of_zeroth_order_and_of_backprop() -> None:
    assert passes("mezo") == 2.0  # two losses
    assert passes("fzoo") == 9.0  # one, and eight beside it
    plain, checkpointed = passes("adamw"), passes("adamw-checkpointed")
    assert 2.5 < plain <= 3.0  # a backward pass is two forward passes, but the first layer's
    assert plain < checkpointed < plain + 1.0  # the layers' forward pass again
    assert passes("adamw", "lora") < plain  # weights that stay need no gradient


@pytest.mark.slow
def test_passes_of_forward_gradients_are_those_of_a_usual_step() -> None:
    assert 3 < passes("forward-adamw") < 12  # tiny layers: attention is a larger part than usual
    assert 3 < passes("horizon") < passes("horizon-default")


def test_counting_moves_nothing_of_the_contest() -> None:
    before = {name: weight.clone() for name, weight in DATA.start.weights.items()}
    passes("adamw")
    assert all(torch.equal(DATA.start.weights[name], weight) for name, weight in before.items())


def linear() -> tuple[nn.Module, Backprop, Callable[[], object]]:
    model = nn.Linear(100, 100, bias=False)
    method = Backprop(torch.optim.Adam(model.parameters()))
    return model, method, lambda: method.step(lambda: model(torch.ones(1, 100)).sum())


WEIGHT = 4 * 100 * 100


def test_bytes_that_stay_and_bytes_at_most() -> None:
    model, method, step = linear()
    assert held_by(model, method) == WEIGHT
    step()
    scalar = 4  # Adam's count of steps
    assert held_by(model, method) == 4 * WEIGHT + scalar  # the weight, its gradient, and two moments
    peak, kind = peak_of(step, model, method, Peak(torch.device("cpu")))
    assert kind == "live tensors"
    assert 4 * WEIGHT <= peak < 7 * WEIGHT  # Adam's own arithmetic is there for a moment


def test_a_tensor_that_is_seen_twice_counts_once() -> None:
    model, method, step = linear()
    tied = nn.ModuleList([model, model])
    step()
    assert held_by(tied, method) == held_by(model, method)


@pytest.mark.parametrize(("count", "calls", "steps"), [(1, 2, 1), (2, 3, 1), (50, 6, 10)])
def test_times_are_of_calls_after_the_first(count: int, calls: int, steps: int) -> None:
    seen: list[int] = []

    def take(part: Tensor) -> None:
        seen.append(len(part))

    assert seconds_of(take, torch.zeros(100, 8), count) > 0
    assert seen == [steps] * calls
