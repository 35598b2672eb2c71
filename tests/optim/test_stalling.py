"""Steps that could not move the parameters: what happened, and what to do."""

from __future__ import annotations

import pytest

from jetplane.optim.stalling import explain
from jetplane.solvers import Status
from jetplane.solvers.base import HEALTHY


@pytest.mark.parametrize("status", [status for status in Status if status not in HEALTHY])
def test_every_status_that_is_not_healthy_has_a_remedy(status: Status) -> None:
    said = explain(7, status)
    assert said.startswith(f"7 steps in a row did not move the parameters, the last with status {status.name}: ")
    assert status.value in said and ("take a smaller lr" in said or "Take fewer directions" in said)
