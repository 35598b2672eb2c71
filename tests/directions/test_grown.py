"""K that grows, or is cut, by what directions gain for their cost."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from jetplane.curvature import ExactHessian, GaussNewton
from jetplane.directions import Gaussian, Grown, Learnt, Mixed, Orthonormal, Plane, PreviousStep
from jetplane.optim import FoMoHKD, HyperplaneSearch
from jetplane.solvers import JitteredInverse, LevenbergMarquardt, SaddleFree, Status

F64 = torch.float64


def bowl(dim: int, seed: int = 0) -> tuple[Tensor, Callable[[], Tensor]]:
    torch.manual_seed(seed)
    x = torch.randn(dim, dtype=F64, requires_grad=True)
    target = torch.randn(dim, dtype=F64)
    return x, lambda: F.mse_loss(x, target)


def sizes(optimizer: HyperplaneSearch, closure: Callable[[], Tensor], steps: int) -> list[int]:
    found = []
    for _ in range(steps):
        optimizer.step(closure)
        assert optimizer.report.status is Status.OK
        found.append(len(optimizer.report.slope))
    return found


# -- when -------------------------------------------------------------------------------------------------------------


def test_it_grows_where_every_direction_gains_as_much() -> None:
    """In a round bowl K directions gain K times as much as one, and the pass without them is paid for once."""
    x, closure = bowl(300)
    family = Grown(Orthonormal, start=2, most=16, patience=1.0)
    optimizer = HyperplaneSearch([x], 1.0, family, GaussNewton(), JitteredInverse())
    found = sizes(optimizer, closure, 80)
    assert found[0] == 2 and sum(found[-30:]) / 30 > 8


def test_it_is_cut_where_the_cost_grows_faster_than_the_gain() -> None:
    """The same bowl with the exact Hessian, which costs K^2: few directions are best."""
    x, closure = bowl(300)
    family = Grown(Orthonormal, start=16, most=16, patience=1.0)
    optimizer = HyperplaneSearch([x], 1.0, family, ExactHessian(), JitteredInverse())
    found = sizes(optimizer, closure, 30)
    assert found == sorted(found, reverse=True) and found[-1] == 2


def test_it_is_cut_where_the_previous_step_gains_all() -> None:
    torch.manual_seed(0)
    x = torch.zeros(200, dtype=F64, requires_grad=True)
    line = torch.randn(200, dtype=F64)
    target = torch.tensor(50.0, dtype=F64)
    family = [PreviousStep(), Grown(Gaussian, start=16, patience=2.0)]
    optimizer = HyperplaneSearch([x], 0.2, family, GaussNewton(), SaddleFree())  # a valley of one direction
    found = sizes(optimizer, lambda: F.mse_loss(x @ line, target), 60)
    assert found[0] == 17 and found[-1] == 3


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    advantages=st.lists(st.floats(-5, 5), max_size=60),
    patience=st.floats(0.5, 5),
    bounds=st.lists(st.integers(2, 100), min_size=3, max_size=3),
)
def test_the_size_stays_within_its_bounds(advantages: list[float], patience: float, bounds: list[int]) -> None:
    smallest, start, most = sorted(bounds)
    family = Grown(Gaussian, smallest, most, start, patience)
    size = family.init().size
    assert size == (start, 0.0)
    for one in advantages:
        before, size = size, family.resized(size, one)
        assert smallest <= size[0] <= most and abs(size[1]) < patience
        assert size[0] in (before[0], min(2 * before[0], most), max(before[0] // 2, smallest))
        if size[0] > before[0]:
            assert one > 0
        if size[0] < before[0]:
            assert one < 0


# -- what is measured -------------------------------------------------------------------------------------------------


def test_the_half_is_the_first_directions() -> None:
    x = torch.zeros(50, dtype=F64)
    family = Mixed([PreviousStep(), Grown(Gaussian, start=8)])
    plane, memory = Plane(3, 5, 0, [x], list), {"0.previous": [torch.ones(50, dtype=F64)]}
    whole, half = (family.draw(plane, Learnt(memory, (k, 0.0))) for k in (8, 4))
    assert (whole.k, half.k) == (9, 5)
    assert torch.equal(half.rows(0, x, 0, 5), whole.rows(0, x, 0, 5))


def test_which_families_change_their_size() -> None:
    grown = Grown(Gaussian)
    assert grown.init().size == Mixed([PreviousStep(), grown]).init().size == (8, 0.0)
    assert Mixed([PreviousStep(), Gaussian(2)]).init().size is None and Gaussian(2).init().size is None
    assert Mixed([PreviousStep(), grown]).fresh([]) == grown.fresh([]) == 128
    assert grown.count([]) == 8 and grown.draw(Plane(0, 0, 0, [torch.zeros(9)], list)).k == 8


# -- where it lives ---------------------------------------------------------------------------------------------------


def saved(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("how", ["state", "copy", "pickle"])
def test_it_goes_on_where_it_was(how: str) -> None:
    x, closure = bowl(300)
    family = [PreviousStep(), Grown(Gaussian, start=2, most=16, patience=0.5)]
    optimizer = HyperplaneSearch([x], 0.5, family, GaussNewton(), LevenbergMarquardt(), clip=10.0)
    sizes(optimizer, closure, 7)
    if how == "state":
        y = x.detach().clone().requires_grad_()
        other = HyperplaneSearch([y], 0.5, family, GaussNewton(), LevenbergMarquardt(), clip=10.0)
        other.load_state_dict(saved(optimizer.state_dict()))
    else:
        other = copy.deepcopy(optimizer) if how == "copy" else pickle.loads(pickle.dumps(optimizer))
        (y,) = other.param_groups[0]["params"]
    target = torch.zeros(300, dtype=F64)
    one = sizes(optimizer, lambda: F.mse_loss(x, target), 12)
    two = sizes(other, lambda: F.mse_loss(y, target), 12)
    assert one == two and len(set(one)) > 1 and torch.equal(x, y)
    assert optimizer.param_groups[0]["size"] == other.param_groups[0]["size"]


def test_a_step_that_is_not_taken_says_nothing() -> None:
    x, closure = bowl(50)
    optimizer = HyperplaneSearch([x], 1.0, Grown(Gaussian, most=16), GaussNewton(), SaddleFree(), patience=None)
    optimizer.step(lambda: closure() * torch.nan)
    assert optimizer.param_groups[0]["size"] == (8, 0.0)
    optimizer.step(closure)
    assert optimizer.param_groups[0]["size"] != (8, 0.0)


def test_a_group_that_is_added_has_the_same_size() -> None:
    x, closure = bowl(50)
    optimizer = HyperplaneSearch([x], 1.0, Grown(Gaussian, most=16), GaussNewton(), SaddleFree())
    optimizer.step(closure)
    optimizer.add_param_group({"params": [torch.zeros(3, dtype=F64, requires_grad=True)]})
    assert optimizer.param_groups[1]["size"] == optimizer.param_groups[0]["size"] != (8, 0.0)


def test_a_state_from_before_there_were_sizes_begins_anew() -> None:
    x, closure = bowl(50)
    optimizer = HyperplaneSearch([x], 1.0, Grown(Gaussian, most=16), GaussNewton(), SaddleFree())
    state = optimizer.state_dict()
    del state["param_groups"][0]["size"]
    optimizer.load_state_dict(state)
    optimizer.step(closure)
    assert len(optimizer.report.slope) == 8


# -- bad input --------------------------------------------------------------------------------------------------------


ORDERED = "expected whole numbers from 2, none smaller than the one before it."


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Grown(3), TypeError, "make is int; expected a function of k such as Gaussian."),  # type: ignore[arg-type]
        (lambda: Grown(Gaussian, start=2.5), TypeError, "start is 2.5; expected a whole number of directions."),  # type: ignore[arg-type]
        (
            lambda: Grown(Gaussian, smallest=1),
            ValueError,
            "smallest, start and most are 1, 8 and 128; " + ORDERED,
        ),
        (
            lambda: Grown(Gaussian, most=4),
            ValueError,
            "smallest, start and most are 2, 8 and 4; " + ORDERED,
        ),
        (lambda: Grown(Gaussian, patience=0.0), ValueError, "patience is 0.0; expected a positive number."),
        (
            lambda: FoMoHKD([torch.zeros(20, requires_grad=True)], directions=Grown(Gaussian)),
            ValueError,
            "k is 128, but the parameters have 20 entries; expected at most as many.",
        ),
        (
            lambda: FoMoHKD([torch.zeros(200, requires_grad=True)], directions=Grown(Gaussian), compile=True),
            ValueError,
            "the directions change their number between steps; expected a fixed K with compile=True.",
        ),
    ],
)
def test_bad_arguments(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        make()
