"""What moves: groups, frozen and unused parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import jetplane as jp
from cases import F64, assert_close
from jetplane.optim import FoMoH, FoMoHKD, Newton
from jetplane.solvers import (
    Status,
)
from stepping import P, Q, another_device, fit, flat, leaf, network, rosenbrock


def test_a_group_added_later_moves() -> None:
    a, b = leaf(1.0, 2.0), leaf(3.0)
    opt = Newton([a])
    opt.step(lambda: a.square().sum() + b.square().sum())
    opt.add_param_group({"params": b, "lr": 0.5})
    assert opt.param_groups[1]["step"] == 1 and b.tolist() == [3.0]
    opt.step(lambda: (a - 1).square().sum() + b.square().sum())
    # the whole space is one plane however it is stretched: Newton ends at the minimum
    assert_close(flat([a, b]), torch.tensor([1.0, 1.0, 0.0], dtype=F64))


def test_a_group_with_lr_zero_stays() -> None:
    a, b = leaf(1.0, 2.0), leaf(3.0)
    FoMoH([{"params": [a], "lr": 0.0}, {"params": [b]}]).step(lambda: (a - b).square().sum())
    assert a.tolist() == [1.0, 2.0] and b.tolist() != [3.0]
    opt = FoMoH([a], lr=0.0)
    opt.step(lambda: a.square().sum())
    assert a.tolist() == [1.0, 2.0] and opt.report.status is Status.OK


def test_frozen_parameters_stay() -> None:
    model = network()
    leaves = list(model.parameters())
    model[0].requires_grad_(False)
    opt = FoMoHKD(leaves, k=2)
    first, last = flat(leaves[:2]), flat(leaves[2:])
    opt.step(fit(model))
    assert torch.equal(flat(leaves[:2]), first) and not torch.equal(flat(leaves[2:]), last)
    model[0].requires_grad_(True)
    model[2].requires_grad_(False)  # later, the other ones
    first, last = flat(leaves[:2]), flat(leaves[2:])
    opt.step(fit(model))
    assert not torch.equal(flat(leaves[:2]), first) and torch.equal(flat(leaves[2:]), last)


@pytest.mark.parametrize("make", [FoMoHKD, Newton, jp.optim.FGD, jp.optim.FoMoHBP, jp.optim.MeZO, jp.optim.FZOO])
def test_where_no_parameter_requires_grad_nothing_moves(make: Any) -> None:
    """As torch.optim's: the loss is evaluated, and all stays as it is."""
    frozen = torch.tensor([3.0, 4.0], dtype=F64)
    opt = make([frozen])
    before = copy.deepcopy(opt.state_dict())
    assert float(opt.step(lambda: (frozen.square().sum(), "aux"), has_aux=True)) == 25.0
    assert opt.report.status is Status.FLAT and opt.report.evaluations == 1 and opt.report.aux == "aux"
    assert opt.state_dict() == before and frozen.tolist() == [3.0, 4.0]
    frozen.requires_grad_()
    assert float(opt.step(lambda: frozen.square().sum())) > 0 and opt.report.status is Status.OK


def test_unused_parameters_stay() -> None:
    a, b = leaf(1.0, 2.0), leaf(3.0)
    FoMoHKD([a, b], k=2, weight_decay=0.1).step(lambda: rosenbrock(a))
    assert b.tolist() == [3.0] and a.tolist() != [1.0, 2.0]


def test_bad_groups_change_nothing() -> None:
    opt = Newton([P], max_dim=4)
    rows = [
        ({"params": [Q], "lr": float("nan")}, ValueError, "lr is nan"),
        ({"params": [P]}, ValueError, "parameter 0 is in another group already"),
        ({"params": [another_device()]}, ValueError, "on meta"),
        ({"params": [torch.arange(2)]}, TypeError, "the new group's parameter 0 has dtype torch.int64"),
        ({"params": [Q]}, ValueError, "the parameters have 5 entries"),
        ({"params": {Q}}, TypeError, "ordered collections"),
    ]
    for group, error, message in rows:
        with pytest.raises(error, match=message):
            opt.add_param_group(group)
        assert len(opt.param_groups) == 1
    with pytest.raises(TypeError, match="must be a dict"):
        opt.add_param_group([Q])


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("compile", [False, True])
def test_without_a_parameter_that_requires_grad_a_step_moves_nothing(compile: bool) -> None:
    """As with torch's optimizers."""
    x, y = torch.ones(2, dtype=F64), torch.ones(2, dtype=F64)
    opt, other = FoMoH([x], compile=compile, patience=1), torch.optim.SGD([y], 0.1)
    for _ in range(3):
        loss = opt.step(lambda: (x.sum(), {"sum": x.sum()}), has_aux=True)
        assert torch.equal(loss, other.step(lambda: y.sum())) and torch.equal(x, y)
    assert opt.report.status is Status.FLAT and opt.report.evaluations == 1 and opt.report.slope.shape == (0,)
    assert float(opt.report.aux["sum"]) == 2.0 and opt.param_groups[0]["step"] == 0
    reports = opt.steps(lambda a: (a * x).sum(), torch.tensor([1.0, 2.0]))
    assert reports.loss.tolist() == [2.0, 4.0] and reports.status == [Status.FLAT] * 2
    x.requires_grad_()  # and it goes on where one does
    opt.step(lambda: x.square().sum())
    assert opt.report.status is Status.OK and not torch.equal(x.detach(), y)
