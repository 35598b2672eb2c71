"""What a program returns beside its result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import jetplane as jp
from jetplane.ad.run.auxiliary import split_aux


@pytest.mark.parametrize("returned", [(1.0,), [1.0, 2.0], None])
def test_anything_but_a_pair_is_refused(returned: object) -> None:
    what = type(returned).__name__
    with pytest.raises(
        TypeError, match=rf"the closure returned {what}; expected a pair \(loss, aux\) with has_aux=True"
    ):
        split_aux(returned, True, "the closure", "loss")
    assert split_aux(returned, False) == (returned, None)


def test_forward_gradients_say_what_loss_fn_returned() -> None:
    w = torch.ones(3, requires_grad=True)

    def losses(x: Tensor) -> Tensor:
        return (x @ w).square()

    with pytest.raises(TypeError, match=r"loss_fn returned Tensor; expected a pair \(losses, aux\) with has_aux=True"):
        jp.forward_gradient(losses, [w], torch.eye(3), has_aux=True)
    loss, aux = jp.forward_gradient(lambda x: (losses(x), "seen"), [w], torch.eye(3), has_aux=True)
    assert (float(loss), aux) == (1.0, "seen")
