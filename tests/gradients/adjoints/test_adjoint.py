"""The table of adjoints: every record has a case, and how records are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adjoint_cases import CASES
from jetplane.gradients.adjoints import adjoint as table

aten = torch.ops.aten


def test_every_case_is_of_a_record() -> None:
    assert CASES.keys() == table.registered().keys()


@pytest.mark.parametrize("func", [aten.relu, aten.add, aten.masked_fill], ids=str)
def test_an_operation_in_place_has_the_record_of_its_functional_form(func: Any) -> None:
    overload = func.overloads()[0]
    in_place = getattr(getattr(aten, func.__name__ + "_"), overload)
    plain = getattr(func, overload)
    assert table.lookup(plain) is not table.UNKNOWN and table.lookup(in_place) is table.lookup(plain)


def test_a_record_holds_for_the_arguments_that_it_names() -> None:
    assert table.find(aten.addmm.default, (1,)).known
    assert not table.find(aten.addmm.default, (0,)).known and not table.find(aten.addmm.default, None).known
    assert table.find(aten.linalg_cross.default, (0,)) is table.UNKNOWN and not table.UNKNOWN.known
    record = table.lookup(aten.addmm.default)
    assert record.product_to((2,)) is not None  # to a parameter, anywhere


def test_what_is_alive_on_both_ways() -> None:
    some, other = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    assert table.both(None, None) is None
    assert torch.equal(table.both(some, None), some) and torch.equal(table.both(None, other), other)
    assert table.both(some, other).tolist() == [True, False, False]
