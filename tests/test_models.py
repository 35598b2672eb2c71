"""Whole models, layers and losses against double backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import jetplane as jp
from cases import (
    LAYERS,
    LOSSES,
    MODELS,
    Case,
    along,
    assert_close,
    assert_quadratic,
    check_against_oracle,
    oracle,
    randn,
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


@pytest.mark.parametrize(("loss", "twin"), [row[1:] for row in LOSSES], ids=[row[0] for row in LOSSES])
def test_losses(loss, twin) -> None:
    check_against_oracle(loss, randn(4, 3), twin=twin, tolerance=1e-10)


def summed(rows: Tensor) -> Tensor:
    return rows.sum(0)


@pytest.mark.parametrize(
    ("mode", "reduce"), [("sum", summed), ("mean", lambda rows: rows.mean(0)), ("max", lambda rows: rows.max(0).values)]
)
def test_embedding_bag_against_its_formula(mode: str, reduce) -> None:
    # embedding_bag has no double backward
    tokens, offsets = torch.tensor([0, 3, 1, 1, 2]), torch.tensor([0, 2])
    check_against_oracle(
        lambda w: F.embedding_bag(tokens, w.sin(), offsets, mode=mode).exp().sum(),
        randn(5, 3),
        twin=lambda w: sum(reduce(w.sin()[bag]).exp().sum() for bag in tokens.split([2, 3])),
    )


def test_weighted_embedding_bag() -> None:
    tokens, offsets = torch.tensor([0, 3, 1, 1, 2]), torch.tensor([0, 2])
    check_against_oracle(
        lambda w, s: F.embedding_bag(tokens, w, offsets, mode="sum", per_sample_weights=s).exp().sum(),
        randn(5, 3),
        randn(5),
        twin=lambda w, s: sum(t.sum(0).exp().sum() for t in (w[tokens] * s[:, None]).split([2, 3])),
    )


def test_weight_norm_against_its_formula() -> None:
    # double backward of torch._weight_norm is wrong in torch 2.13 (its curvature is not symmetric): no oracle
    x = randn(3, 5)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4, bias=False)).double()
    leaves = list(layer.parameters())
    directions = along(leaves, 3)
    with jp.perturb(leaves, directions) as jets:
        actual = jets.quadratic(layer(x).sin().sum())
    length, weight = leaves
    formula = double_backward(
        lambda: (x @ (length * weight / weight.norm(dim=1, keepdim=True)).T).sin().sum(), leaves, directions
    )
    assert_quadratic(actual, formula)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_first_order_does_no_second_order_work(k: int) -> None:
    net = nn.Sequential(
        nn.Linear(4, 8, bias=False), nn.Linear(8, 16, bias=False), nn.Linear(16, 2, bias=False)
    ).double()
    x, leaves = randn(3, 4), list(net.parameters())
    products = [2 * 3 * p.numel() for p in leaves]
    with FlopCounterMode(display=False) as counter, jp.perturb(leaves, along(leaves, k), pairs="none"):
        net(x).sum()
    # the first layer's input has no tangent: one product for the value, K for the weight's directions
    assert counter.get_total_flops() == products[0] * (1 + k) + (products[1] + products[2]) * (1 + 2 * k)


def test_data_without_tangents_gives_no_second_rows() -> None:
    w, x = randn(4, 3), randn(5, 3)
    with jp.perturb([w], [randn(2, 4, 3)]) as jets:
        assert jets._pass.mode.jet(x @ w.T).second is None


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


def test_dropout_of_fused_attention_is_drawn_once() -> None:
    q, k, v = randn(3, 1, 2, 4, 8)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def program(q: Tensor) -> Tensor:
        return fused(q, k, v, 0.5, True)[0].square().sum()

    assert jp.verify(program, q).ok
    torch.manual_seed(0)
    whole = jp.hessian(program, q)
    torch.manual_seed(0)
    assert_close(jp.hessian(program, q, chunk_size=7), whole)
    assert float(whole.abs().max()) > 0.1
