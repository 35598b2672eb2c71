"""Where nested torch.func.jvp is wrong at second order, jetplane is right: closed forms on fixed inputs.

Nothing here asserts that torch is wrong, for a later release may be right.
"""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

import jetplane as jp
from jetplane.testing import nested_jvp
from jetplane.testing.nested_jvp import CASES, Case, Cube

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))


@cases
def test_jetplane_equals_the_closed_form(case: Case) -> None:
    assert nested_jvp.relative_error(nested_jvp.by_jetplane(case), case.closed) < 1e-9


@cases
def test_closed_form_equals_double_backward(case: Case) -> None:
    assert nested_jvp.relative_error(nested_jvp.by_double_backward(case), case.closed) < 1e-12


@cases
def test_closed_form_equals_finite_differences(case: Case) -> None:
    assert nested_jvp.relative_error(nested_jvp.by_differences(case), case.closed) < 1e-6


@cases
def test_both_directions_of_a_plane(case: Case) -> None:
    # the plane of v and 2v: curvature c, 2c, 4c
    if case.rule is not None:
        jp.register.composite(*case.rule)
    try:
        directions = tuple(torch.stack([v, 2 * v]) for v in case.tangents())
        curvature = jp.quadratic(case.program, case.primals(), directions).curvature
    finally:
        if case.rule is not None:
            jp.register.remove(case.rule[0])
    expected = case.closed * torch.tensor([[1.0, 2.0], [2.0, 4.0]], dtype=torch.float64)
    torch.testing.assert_close(curvature, expected, rtol=1e-9, atol=1e-12)


def test_the_issue_is_covered() -> None:
    names = " ".join(case.name for case in CASES)
    for operation in ("layer_norm", "batch_norm", "det", "slogdet", "cumprod at a zero", "householder", "Function"):
        assert operation in names


def test_nested_jvp_gives_a_number_or_a_refusal() -> None:
    for case in CASES:
        value = nested_jvp.by_nested_jvp(case)
        assert isinstance(value, str) or math.isfinite(value)


def test_a_custom_function_without_a_rule_is_refused() -> None:
    with pytest.raises(jp.MissingRule, match="Cube"):
        jp.quadratic(lambda x: Cube.apply(x).sum(), torch.ones(2), torch.ones(1, 2))


def test_relative_error_is_absolute_at_zero() -> None:
    assert nested_jvp.relative_error(0.5, 0.0) == 0.5
    assert nested_jvp.relative_error(3.0, -2.0) == 2.5


@pytest.mark.slow
def test_the_command_prints_the_table() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jetplane.testing.nested_jvp"], capture_output=True, text=True, check=True, timeout=120
    )
    assert f"torch {torch.__version__}" in done.stdout
    assert done.stdout.count("\n| ") == 2 + len(CASES)
    assert "MissingRule" not in done.stdout
