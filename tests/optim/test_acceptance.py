"""Steps that are tested before they are taken."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import F64, assert_close
from jetplane.curvature import ExactHessian
from jetplane.directions import Coordinate
from jetplane.optim import FGD, Acceptance, FoMoH, HyperplaneSearch, Newton
from jetplane.solvers import (
    Cubic,
    Damped,
    JitteredInverse,
    Solver,
    Status,
    TrustRegion,
)
from stepping import fit, leaf, noisy, rosenbrock

REJECTING: list[Solver] = [TrustRegion(1.0), Cubic(1.0), Damped(1e-3)]
CAUTIOUS: list[Solver] = [TrustRegion(0.1), Cubic(1e4), Damped(10.0)]


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("solver", REJECTING, ids=repr)
def test_a_solver_that_needs_it_rejects_by_default(solver: Solver) -> None:
    x = torch.randn(6, dtype=F64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    opt = Newton([x], solver=solver)
    losses, calls, statuses = [], 0, set()

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        return rosenbrock(x)

    for number in range(1, 21):
        losses.append(float(opt.step(closure)))
        statuses.add(opt.report.status)
        assert opt.report.evaluations == 2 and calls == 2 * number  # the pass at the end is counted
    assert losses == sorted(losses, reverse=True) and statuses == {Status.OK, Status.REJECTED}


def test_rejection_can_be_turned_off_and_is_not_for_the_papers_methods() -> None:
    taken = []
    for options in ({"solver": TrustRegion(100.0), "accept": False}, {"lr": 3.0}, {"solver": TrustRegion(100.0)}):
        x = leaf(1.0)
        opt = Newton([x], **options)
        opt.step(lambda x=x: (x**4).sum() - 5 * x.square().sum().clamp_max(2))
        taken.append(opt.report.status)
    assert taken == [Status.OK, Status.OK, Status.REJECTED]


def test_the_default_is_in_a_copy_and_survives_another_solver() -> None:
    x = leaf(1.0)
    opt = copy.deepcopy(Newton([x], solver=TrustRegion(1.0)))
    assert opt._settings.accept == Acceptance()
    opt.solver = JitteredInverse()
    assert opt._settings.accept is None


@pytest.mark.parametrize(
    "options", [{"accept": Acceptance(backtracks=5)}, *({"solver": solver} for solver in CAUTIOUS)], ids=str
)
def test_acceptance_sees_the_same_dropout_mask(options: dict[str, Any]) -> None:
    model = noisy()
    before = state(model)
    opt = FoMoH(model.parameters(), lr=0.1, **options)
    torch.manual_seed(5)
    loss = opt.step(fit(model))
    after = state(model)
    model.load_state_dict(
        {name: after[name] if name in dict(model.named_parameters()) else before[name] for name in after}
    )
    torch.manual_seed(5)
    assert opt.report.actual is not None and opt.report.status is Status.OK
    assert_close(loss - fit(model)().detach(), opt.report.actual)


def test_rejected_trials_leave_no_trace_in_buffers() -> None:
    model = noisy()
    opt = FGD(model.parameters(), lr=1e200, accept=Acceptance())
    opt.step(fit(model))
    assert opt.report.status is Status.REJECTED
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_acceptance_rejects() -> None:
    x = leaf(1.0)
    opt = HyperplaneSearch([x], 3.0, Coordinate(), ExactHessian(), JitteredInverse(), accept=Acceptance())
    opt.step(lambda: x.square().sum())  # the step ends at -2
    assert x.tolist() == [1.0] and opt.report.status is Status.REJECTED
    assert opt.report.actual is not None
    assert_close(opt.report.actual, torch.tensor(-3.0, dtype=F64))
    assert opt.report.evaluations == 2


def test_acceptance_backtracks() -> None:
    x = leaf(1.0)
    opt = HyperplaneSearch([x], 8.0, Coordinate(), ExactHessian(), JitteredInverse(), accept=Acceptance(backtracks=3))
    opt.step(lambda: x.square().sum())  # -7, -3, -1: as high as 1, which does not rise
    assert opt.report.evaluations == 4 and opt.report.status is Status.OK
    assert_close(x.detach(), torch.tensor([-1.0], dtype=F64))
    assert_close(opt.report.coefficients, torch.tensor([-0.25], dtype=F64))
    x = leaf(1.0)
    strict = Acceptance(backtracks=5, fraction=0.1)
    opt = HyperplaneSearch([x], 8.0, Coordinate(), ExactHessian(), JitteredInverse(), accept=strict)
    opt.step(lambda: x.square().sum())
    assert opt.report.actual is not None
    assert_close(opt.report.predicted, opt.report.actual)


def test_acceptance_gives_up_after_its_backtracks() -> None:
    x = leaf(1.0)
    opt = Newton([x], lr=1e6, accept=Acceptance(backtracks=4))
    opt.step(lambda: x.square().sum())
    assert x.tolist() == [1.0] and opt.report.status is Status.REJECTED and opt.report.evaluations == 6
