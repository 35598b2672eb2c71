"""Whole models, layers and losses against double backward."""

from __future__ import annotations

import pytest
import torch

import jetplane as jp
from cases import (
    LAYERS,
    MODELS,
    Case,
    along,
    assert_close,
    assert_quadratic,
    oracle,
)
from jetplane.testing.oracle import double_backward

CASES = MODELS + LAYERS

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def named(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@named(CASES)
def test_quadratic_of_three_directions(case: Case) -> None:
    params, program = case.build()
    directions = dict(zip(params, along(list(params.values()), 3), strict=True))
    with jp.perturb(params, directions) as jets:
        loss = program()
    expected = oracle(program, list(params.values()), list(directions.values()))
    assert float(expected.slope.abs().max()) > 1e-6
    assert_quadratic(jets.quadratic(loss), expected, case.tolerance)


@named(CASES)
def test_one_direction_and_first_order_only(case: Case) -> None:
    params, program = case.build()
    leaves = list(params.values())
    directions = along(leaves, 1)
    with jp.perturb(leaves, directions) as jets:
        quadratic = jets.quadratic(program())
    with jp.perturb(leaves, directions, pairs="none") as first:
        jet = first.of(program())
    assert_quadratic(quadratic, oracle(program, leaves, directions), case.tolerance)
    assert_close(jet.tangent, quadratic.slope, case.tolerance)
    assert jet.second.shape == (0,)


@pytest.mark.parametrize("name", ["cnn", "transformer-causal", "LSTM", "GRU", "encoder-eval", "residual-train"])
def test_float32_uses_other_kernels_and_agrees_with_float64(name: str) -> None:
    case = next(case for case in MODELS if case.name == name)
    torch.manual_seed(3)
    model = case.model().train(case.train)
    data = case.data()
    data = data.float() if data.is_floating_point() else data
    leaves = list(model.parameters())
    directions = along(leaves, 2)
    torch.manual_seed(4)
    with jp.perturb(leaves, directions) as jets:
        actual = jets.quadratic(case.loss(model(data)))
    assert actual.curvature.dtype == torch.float32
    model.double()
    data = data.double() if data.is_floating_point() else data
    exact = double_backward(lambda: case.loss(model(data)), list(model.parameters()), [d.double() for d in directions])
    torch.testing.assert_close(
        actual.slope.double(), exact.slope, rtol=1e-3, atol=1e-3 * float(exact.slope.abs().max())
    )
    torch.testing.assert_close(
        actual.curvature.double(), exact.curvature, rtol=1e-3, atol=1e-3 * float(exact.curvature.abs().max())
    )
