"""Launches of processes that tests of several rooms share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import collective_jobs
import sharded_jobs
from group_jobs import all_jobs, long_jobs
from many_processes import launch

Launch = Callable[[str, int, Any], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """A function that launches processes, in a folder for all workers of a run of tests, and says what they did."""
    torch.set_num_threads(1)  # as the processes have, whose bits are compared with those of this one
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return lambda name, size, jobs: launch(base / name, size, jobs)


@pytest.fixture(scope="session")
def two(launched: Launch) -> list[dict[str, Any]]:
    """What two processes did with every optimizer, by rank."""
    return launched("two", 2, all_jobs)


@pytest.fixture(scope="session")
def four(launched: Launch) -> list[dict[str, Any]]:
    """What four did in a hundred steps."""
    return launched("four", 4, long_jobs)


def short_jobs() -> dict[str, Callable[[Any], Any]]:
    # what breaks its group on purpose comes last
    return {**sharded_jobs.short_jobs(), **collective_jobs.short_jobs()}


@pytest.fixture(scope="session")
def pair(launched: Launch) -> list[dict[str, Any]]:
    """What two processes did with collectives and with shared parameters, by rank."""
    return launched("pair", 2, short_jobs)


@pytest.fixture(scope="session")
def pair_steps(launched: Launch) -> list[dict[str, Any]]:
    """What two did in more steps."""
    return launched("pair_steps", 2, sharded_jobs.steps_jobs)


def four_jobs() -> dict[str, Callable[[Any], Any]]:
    return {**sharded_jobs.both_jobs(), **collective_jobs.all_programs()}


@pytest.fixture(scope="session")
def quartet(launched: Launch) -> list[dict[str, Any]]:
    """What four did."""
    return launched("quartet", 4, four_jobs)
