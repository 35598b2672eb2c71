"""The launches of processes that tests share: fixtures of several rooms."""

from __future__ import annotations

import os
from typing import Any

import pytest

from group_jobs import all_jobs, long_jobs
from many_processes import launch


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder for all workers of a run of tests."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def two(shared: Any) -> list[dict[str, Any]]:
    """What two processes did, by rank."""
    return launch(shared / "two", 2, all_jobs)


@pytest.fixture(scope="session")
def four(shared: Any) -> list[dict[str, Any]]:
    """What four did in a hundred steps."""
    return launch(shared / "four", 4, long_jobs)
