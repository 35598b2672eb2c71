"""Settings that all tests and docstring examples share."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


@pytest.fixture(autouse=True)
def _names_in_docstrings(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace["torch"] = torch
