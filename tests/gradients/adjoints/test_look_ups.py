"""The adjoints of look-ups in a table of parameters."""

from __future__ import annotations

from typing import Any

import pytest

from adjoint_cases import BY_MODULE, check_record


@pytest.mark.parametrize("op", BY_MODULE["look_ups"], ids=str)
def test_a_record_equals_the_default(op: Any) -> None:
    check_record(op)
