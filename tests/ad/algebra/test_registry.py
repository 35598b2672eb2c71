"""The table of rules: one for each operation, found by overload or by packet."""

from __future__ import annotations

import pytest
import torch

import jetplane as jp
from cases import check_against_oracle, randn
from jetplane import register
from own_operations import cube

pytestmark = pytest.mark.usefixtures("clean_table")


def test_registering_twice_and_removing() -> None:
    register.constant(torch.ops.jptest.cube)
    with pytest.raises(
        ValueError, match=r"jptest.cube already has a rule of family 'constant'; expected one rule for each"
    ):
        register.constant(torch.ops.jptest.cube)
    register.remove(torch.ops.jptest.cube)
    with pytest.raises(ValueError, match=r"jptest.cube has no rule to remove"):
        register.remove(torch.ops.jptest.cube)
    with pytest.raises(jp.MissingRule):
        jp.gradient(lambda x: cube(x).sum(), randn(3))


def test_an_own_rule_cannot_replace_one_of_torch() -> None:
    with pytest.raises(ValueError, match=r"aten.tanh already has a rule of family 'elementwise'"):
        register.constant(torch.ops.aten.tanh)


def test_a_rule_of_an_overload_is_enough() -> None:
    register.elementwise(torch.ops.jptest.cube.default, lambda x, y: 3 * x**2, lambda x, y, d: 6 * x)
    try:
        check_against_oracle(lambda x: cube(x).sum(), randn(4), twin=lambda x: (x**3).sum())
    finally:
        register.remove(torch.ops.jptest.cube.default)
