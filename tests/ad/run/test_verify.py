"""verify: what a user runs before trusting the engine with a program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_coverage import problem, state
from torch import Tensor, nn

import jetplane as jp
from jetplane.ad.algebra.families import jet_rule
from jetplane.ad.algebra.jet import Operand
from jetplane.ad.run.verify import Check, Verification


def test_verify_agrees_and_leaves_no_trace() -> None:
    model, params, x, y = problem()
    before = state(model)
    found = jp.verify(lambda: F.cross_entropy(model(x), y), params)
    assert found.ok and found.differing == ()
    assert {check.verdict for check in found.checks} == {"agree"}
    assert all(map(torch.equal, state(model), before))


def test_verify_finds_a_lost_tangent() -> None:
    layer = nn.Linear(3, 3).double()
    x = torch.randn(4, 3, dtype=torch.float64)

    def closure() -> Tensor:
        return (F.linear(x, layer.weight, layer.bias.detach()).tanh() * layer.bias).sum()

    found = jp.verify(closure, dict(layer.named_parameters()))
    assert not found.ok
    assert found.differing == ("bias",)
    assert "differ        slope 0        bias: engine" in str(found)


def test_verify_finds_a_wrong_rule() -> None:
    @torch.library.custom_op("diagnose::cube", mutates_args=())
    def cube(x: Tensor) -> Tensor:
        return x**3

    op = torch.ops.diagnose.cube
    jp.register.elementwise(op, lambda x, y: 3 * x**2, lambda x, y, d: 5 * x)  # should be 6 x
    try:
        found = jp.verify(lambda x: op(x).sum(), torch.tensor([1.0, 2.0], dtype=torch.float64))
    finally:
        jp.register.remove(op)
    assert [check.verdict for check in found.checks[:2]] == ["agree", "differ"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_verify_does_not_raise_a_false_alarm_at_kinks(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 30), nn.ReLU(), nn.Linear(30, 1)).to(dtype)
    x = torch.randn(40, 3, dtype=dtype)
    assert jp.verify(lambda: model(x).square().mean(), dict(model.named_parameters())).ok


def test_verify_needs_a_scalar() -> None:
    with pytest.raises(ValueError, match=r"the program returned \(2,\); expected a scalar loss"):
        jp.verify(lambda x: x * x, torch.ones(2))


def test_verify_carries_several_directions_and_checks_cross_terms() -> None:
    found = jp.verify(lambda x: (x[0] ** 2 * x[1]).sum(), torch.tensor([1.0, 2.0], dtype=torch.float64))
    slopes, diagonal = ["slope 0", "slope 1", "slope 2"], ["curvature 0,0", "curvature 1,1", "curvature 2,2"]
    cross = ["curvature 0,1", "curvature 0,2", "curvature 1,2"]
    assert sorted(check.what for check in found.checks) == sorted(slopes + diagonal + cross)
    assert {check.verdict for check in found.checks} == {"agree"}


@pytest.mark.parametrize("part", ["tangent", "second"])
def test_verify_finds_rows_of_the_wrong_direction(part: str) -> None:
    # as a lift that gives the rows of one direction to all: with a single direction nothing is wrong
    @torch.library.custom_op("diagnose::square", mutates_args=())
    def square(x: Tensor) -> Tensor:
        return x * x

    op = torch.ops.diagnose.square

    def rule(pairs: jp.PairSet, op: Any, x: Any) -> Operand:
        rows = {"tangent": 2 * x.primal * x.tangent, "second": None}
        if pairs.rows:
            rows["second"] = 2 * pairs.outer(x.tangent, x.tangent)
        wrong = rows[part]
        rows[part] = wrong if wrong is None else wrong[-1:].expand(wrong.shape)
        return Operand(op(x.primal), **rows)

    jet_rule(op)(rule)
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    try:
        assert jp.verify(lambda x: op(x).sum(), x, directions=1).ok
        found = jp.verify(lambda x: op(x).sum(), x)
    finally:
        jp.register.remove(op)
    assert not found.ok


def test_a_difference_without_power_is_inconclusive() -> None:
    assert Check("all", "slope 0", 0.033, 10.6, 20.0, scale=10.6).verdict == "inconclusive"
    assert Check("all", "slope 0", 0.0, 1e-12, 1e-11, scale=1.0).verdict == "agree"
    assert Check("all", "slope 0", 1.0, 1.0, float("nan"), scale=1.0).verdict == "differ"
    assert not Verification((Check("all", "slope 0", 0.033, 10.6, 20.0, scale=10.6),)).ok


def test_verify_does_not_agree_where_rounding_hides_the_slope() -> None:
    # float32 next to 1e8: its neighbours are 8 apart
    found = jp.verify(lambda x: 1e8 + x.square().sum(), torch.tensor([1.0, 2.0]))
    assert {check.verdict for check in found.checks if check.what.startswith("slope")} == {"inconclusive"}


@pytest.mark.parametrize("start", [[0.3, 0.7], [1.0], [1.0] * 3, [1.0] * 5], ids=str)
def test_verify_is_inconclusive_where_a_program_varies_within_its_steps(start: list[float]) -> None:
    """Its differences grow as the step gets shorter, so no limit is in sight."""
    found = jp.verify(lambda x: (1e9 * x).sin().sum(), torch.tensor(start, dtype=torch.float64))
    assert {check.verdict for check in found.checks} == {"inconclusive"} and not found.ok


def test_verify_needs_a_direction() -> None:
    with pytest.raises(ValueError, match="directions is 0; expected a positive integer"):
        jp.verify(lambda x: x.sum(), torch.ones(2), directions=0)
