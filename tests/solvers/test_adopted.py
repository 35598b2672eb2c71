"""Solvers written for version 0.1.0 work as they did."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import jetplane as jp
from jetplane.directions import Gaussian
from jetplane.optim import HyperplaneSearch
from jetplane.solvers import (
    Adaptive,
    Damped,
    JitteredInverse,
    LevenbergMarquardt,
    SaddleFree,
    Step,
    TracedStep,
    adaptive,
)
from jetplane.solvers.adopted import Called, adopted, traces


@dataclass(frozen=True)
class Plain:
    """As SaddleFree: a callable, no more."""

    descends: ClassVar[bool] = True

    def __call__(self, model: jp.Quadratic) -> Step:
        return SaddleFree()(model)


@dataclass(frozen=True)
class Following01:
    """As LevenbergMarquardt, by state, at and update."""

    damping: float = 1.0
    descends: ClassVar[bool] = True

    @property
    def state(self) -> float:
        return self.damping

    def at(self, state: float) -> Following01:
        return replace(self, damping=state)

    def update(self, state: float, predicted: float | Tensor, actual: float | Tensor) -> float:
        return LevenbergMarquardt().update(state, predicted, actual)

    def __call__(self, model: jp.Quadratic) -> Step:
        return LevenbergMarquardt(self.damping)(model)

    def traced(self, model: jp.Quadratic, state: Tensor) -> TracedStep:
        return LevenbergMarquardt().traced(model, state)

    def traced_update(self, state: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:
        return LevenbergMarquardt().traced_update(state, predicted, actual)


class Halved(Damped):
    """A solver of today with the call of version 0.1.0."""

    def __call__(self, model: jp.Quadratic) -> Step:
        step = Damped(self.damping)(model)
        return step._replace(coefficients=step.coefficients / 2)


def walked(solver: Any) -> tuple[Tensor, Any]:
    """Where a search with this solver is after ten steps, and the solver's state."""
    x = torch.linspace(-1, 1, 6, dtype=torch.float64, requires_grad=True)
    search = HyperplaneSearch([x], 0.7, Gaussian(3), "exact", solver)
    for _ in range(10):
        search.step(lambda: (x.exp() - x).sum() + (x[:3] * x[3:].cos()).square().sum())
    return x.detach(), search.param_groups[0]["solver_state"]


@pytest.mark.parametrize(
    ("earlier", "today"), [(Plain(), SaddleFree()), (Following01(), LevenbergMarquardt())], ids=["plain", "following"]
)
def test_solvers_of_0_1_0_are_those_of_today(earlier: Any, today: Any) -> None:
    (one, state), (other, expected) = walked(earlier), walked(today)
    assert torch.equal(one, other) and state == expected


def test_a_call_that_a_subclass_overrides_is_used() -> None:
    x = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    search = HyperplaneSearch([x], 1.0, Gaussian(1), "exact", Halved(1e-9))
    search.step(lambda: x.square().sum())
    torch.testing.assert_close(x.detach(), torch.tensor([1.5], dtype=torch.float64), rtol=1e-6, atol=0.0)
    assert search.param_groups[0]["solver_state"] == Damped().update(1e-9, 1.0, 1.0)


def test_who_follows_and_who_can_be_traced() -> None:
    assert isinstance(Following01(), Adaptive) and adaptive(Following01()) and adaptive(Damped())
    assert not adaptive(Plain()) and not adaptive(SaddleFree())
    assert adopted(Plain()) == Called(Plain()) and adopted(SaddleFree()) == SaddleFree()
    assert traces(adopted(Following01())) and traces(JitteredInverse()) and traces(LevenbergMarquardt())
    assert not traces(adopted(Plain())) and not traces(SaddleFree())


def test_a_traced_solver_of_0_1_0() -> None:
    model = jp.Quadratic(torch.tensor(0.0), torch.tensor([6.0]), torch.tensor([[2.0]]))
    solver, state = adopted(Following01()), torch.tensor(0.5, dtype=torch.float64)
    assert isinstance(solver, Called)
    assert torch.equal(solver.traced(model, state).coefficients, torch.tensor([-2.0]))
    after = solver.traced_update(state, torch.tensor(1.0), torch.tensor(0.0))
    assert float(after) == Following01().update(0.5, 1.0, 0.0)
