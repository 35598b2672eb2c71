"""The adjoint of attention, whichever kernel it runs."""

from __future__ import annotations

from typing import Any

import pytest

from adjoint_cases import BY_MODULE, check_record


@pytest.mark.parametrize("op", BY_MODULE["attending"], ids=str)
def test_a_record_equals_the_default(op: Any) -> None:
    check_record(op)
