"""What an optimizer keeps for directions that remember."""

from __future__ import annotations

import re

import pytest
import torch

from jetplane.directions import (
    Gaussian,
    Mixed,
    Momentum,
    PreviousStep,
)
from jetplane.optim import FoMoHKD
from jetplane.solvers import SaddleFree, Status
from searches import F64, batch, loss_of, network, search, steps


def test_memory_has_the_dtype_of_its_parameter_also_when_it_is_loaded() -> None:
    model = network(torch.float32)
    optimizer = search(model, [PreviousStep(), Gaussian(2)])
    steps(optimizer, model, 2)
    twin = network(F64)
    other = search(twin, [PreviousStep(), Gaussian(2)])
    other.load_state_dict(optimizer.state_dict())
    assert other.state[twin[0].weight]["0.previous"].dtype == F64
    steps(other, twin, 1)
    short = network(torch.bfloat16)
    other = search(short, [PreviousStep(), Momentum(0.9), Gaussian(2)])
    steps(other, short, 3)
    assert other.state[short[0].weight]["1.momentum"].dtype == torch.bfloat16
    assert all(p.isfinite().all() for p in short.parameters())


def test_a_parameter_that_is_added_or_freed_later_begins_with_nothing() -> None:
    model = network()
    optimizer = search(model[2], [PreviousStep(), Gaussian(2)])
    steps(optimizer, model, 2)
    optimizer.add_param_group({"params": [model[0].weight]})
    steps(optimizer, model, 1)
    model[0].bias.requires_grad_(False)
    optimizer.add_param_group({"params": [model[0].bias]})
    steps(optimizer, model, 1)
    assert "0.previous" not in optimizer.state.get(model[0].bias, {})
    model[0].bias.requires_grad_(True)
    steps(optimizer, model, 2)
    assert optimizer.state[model[0].bias]["0.previous"].any()


def test_memory_of_another_shape_is_refused() -> None:
    model = network()
    optimizer = search(model, [Momentum([0.5, 0.9]), Gaussian(2)])
    steps(optimizer, model, 1)
    other = search(model, [Momentum(0.9), Gaussian(2)])
    other.load_state_dict(optimizer.state_dict())
    message = (
        "the memory '0.momentum' of parameter 0 is (2, 5, 4) torch.float64 on cpu; "
        "expected (1, 5, 4) torch.float64 on cpu."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        steps(other, model, 1)


def test_numbers_as_parameters_are_remembered() -> None:
    x, y = torch.tensor(3.0, dtype=F64, requires_grad=True), torch.empty(0, dtype=F64, requires_grad=True)
    optimizer = FoMoHKD([x, y], directions=Momentum([0.5]), solver=SaddleFree(), patience=None)
    optimizer.step(lambda: x.square() + y.sum())
    assert optimizer.report.status is Status.FLAT  # there is nothing to remember yet
    optimizer.directions = Mixed([Momentum(0.5), PreviousStep(), Gaussian(1)])
    for _ in range(3):
        optimizer.step(lambda: x.square() + y.sum())
    assert abs(float(x.detach())) < 1e-9 and optimizer.state[x]["0.momentum"].shape == (1,)


def test_memory_made_in_inference_mode_is_written_outside_of_it() -> None:
    model, (x, y) = network(), batch()
    optimizer = search(model, [PreviousStep(), Gaussian(2)])
    with torch.inference_mode():
        optimizer.step(loss_of(model), x, y)
    optimizer.step(loss_of(model), x, y)
    assert optimizer.report.status is Status.OK
