"""A step inside a closure of the same optimizer's step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jetplane.optim import FGD, FZOO, FoMoHKD, GaussNewtonSearch, HorizonAdam, MeZO

OPTIMIZERS: list[Callable[[Iterable[Tensor]], Any]] = [FGD, FZOO, FoMoHKD, GaussNewtonSearch, HorizonAdam, MeZO]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_step_in_its_own_closure_is_refused_and_the_next_one_is_not(make: Callable[..., Any]) -> None:
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    x, opt = torch.eye(3, dtype=torch.float64), make([weight])
    single = make in (GaussNewtonSearch, HorizonAdam)

    def losses(x: Tensor) -> Tensor:
        return F.mse_loss(x @ weight, torch.zeros_like(weight), reduction="none" if single else "sum")

    def inside(x: Tensor) -> Tensor:
        opt.step(losses, x)
        return losses(x)

    message = f"step of {type(opt).__name__} was called by its own closure; expected a closure that computes the loss"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        opt.step(inside, x)
    assert torch.is_grad_enabled()
    torch.testing.assert_close(weight.detach(), torch.ones(3, dtype=torch.float64))
    assert bool(opt.step(losses, x).isfinite())
