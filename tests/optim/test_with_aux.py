"""Closures that return a loss and something else."""

from __future__ import annotations

import pytest
import torch

from jetplane.optim import FGD, FoMoH, FoMoHBP, FoMoHKD


@pytest.mark.parametrize("make", [FGD, FoMoH, FoMoHBP, lambda p, lr: FoMoHKD(p, lr, k=2, chunk_size=1)])
def test_aux_is_that_of_the_point_before_the_step(make):
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    opt = make([x], 0.1)
    before = x.detach().clone()
    loss = opt.step(lambda: (x.square().sum(), {"x": x, "name": "aux"}), has_aux=True)
    assert float(loss) == 25.0
    assert torch.equal(opt.report.aux["x"], before) and opt.report.aux["name"] == "aux"
    assert not opt.report.aux["x"].requires_grad and not torch.equal(x.detach(), before)


def test_aux_of_several_closures_is_a_list():
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    opt = FoMoH([x], 0.1)
    opt.step([lambda: (x.square().sum(), 1), lambda: (x.sum(), 2)], has_aux=True)
    assert opt.report.aux == [1, 2]
    opt.step(lambda: x.square().sum())
    assert opt.report.aux is None


def test_a_closure_without_aux_is_refused():
    x = torch.tensor([3.0], requires_grad=True)
    with pytest.raises(TypeError, match=r"the closure returned Tensor; expected a pair \(loss, aux\) with has_aux"):
        FoMoH([x]).step(lambda: x.square().sum(), has_aux=True)
