"""What a step of HorizonAdam is called with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jetplane.optim.horizon.calls import LossCall, calls_of, losses_of


def test_a_function_with_its_batch_is_one_call_and_closures_are_several() -> None:
    assert calls_of(len, ([1],)) == [LossCall(len, ([1],))]
    assert calls_of([len, max], ()) == [LossCall(len, ()), LossCall(max, ())]


def test_the_mean_of_the_losses_is_that_of_the_parts_means() -> None:
    parts = torch.arange(3.0), torch.tensor([[5.0, 2.0], [1.0, 0.0]])
    losses = losses_of([LossCall(lambda part: (part, "aux"), (part,)) for part in parts], has_aux=True)
    assert losses.shape == (5,) and float(losses.mean()) == pytest.approx((1 + 4) / 2)
    assert torch.equal(losses_of([LossCall(lambda: parts[0], ())], has_aux=False), parts[0])


@pytest.mark.parametrize(
    ("closure", "batch", "kind", "message"),
    [
        (
            None,
            (),
            TypeError,
            "step got NoneType; expected a function that returns the losses of a batch's samples, or",
        ),
        ([], (), ValueError, "step got an empty list of closures; expected at least one."),
        ([len], (1,), TypeError, "step got a list of closures and a batch; expected closures without arguments."),
        ([len, 3], (), TypeError, "closure 1 of the list is int; expected a function that returns the losses of a"),
    ],
)
def test_bad_calls(closure: Any, batch: tuple[Any, ...], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        calls_of(closure, batch)
    assert str(caught.value).startswith(message)
