"""What the arguments of a step are: the same answers for every optimizer, with its own words for what is wanted."""

from __future__ import annotations

from typing import Any

import pytest

from jetplane.optim.batch_parts import parts_of


def test_a_function_goes_with_its_batch_and_closures_without() -> None:
    assert parts_of(len, (1, 2), "a loss") == [(len, (1, 2))]
    assert parts_of([len, max], (), "a loss") == [(len, ()), (max, ())]


@pytest.mark.parametrize(
    ("closure", "batch", "error", "message"),
    [
        (3, (), TypeError, "step got int; expected a loss, or a list of closures, one for each part of a batch."),
        ([len], (1,), TypeError, "step got a list of closures and a batch; expected closures without arguments."),
        ([], (), ValueError, "step got an empty list of closures; expected at least one."),
        ([len, None], (), TypeError, "closure 1 of the list is NoneType; expected a loss."),
    ],
)
def test_what_is_no_closure_is_refused(closure: Any, batch: tuple[Any, ...], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        parts_of(closure, batch, "a loss")
