"""What all tests and docstring examples share, and ``--rooms``: the time that each room's tests took.

The default dtype stays float32: tests say float64 where they mean it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import pytest
import torch

pytest_plugins = ["launches"]  # processes whose work tests of several rooms look at

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores

# what a trainer's package is needed for is not looked at without it
_TRAINERS = {"accelerate": ["accelerate"], "lightning": ["lightning"], "transformers": ["accelerate", "transformers"]}
collect_ignore = [
    f"src/jetplane/integrations/{name}.py"
    for name, packages in _TRAINERS.items()
    if not all(map(importlib.util.find_spec, packages))
]


@pytest.fixture(autouse=True)
def _names_in_docstrings(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace["torch"] = torch


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_mode_left() -> Iterator[None]:
    """No test may leave a mode active behind it."""
    yield
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0


@pytest.fixture(autouse=True)
def no_accelerator_left() -> Iterator[None]:
    """accelerate keeps the first Accelerator's settings for its whole process."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """No signal is ignored, as it is where a shell has started the tests in the background, or under nohup."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def nothing_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test runs what another one has compiled."""
    from jetplane.optim import compiled_step  # which imports torch's compiler

    monkeypatch.setattr(compiled_step, "_SHARED", OrderedDict())


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be compiled is traced, and the trace is run."""
    from jetplane.ad import _torch
    from tracing import trace_only

    monkeypatch.setattr(_torch, "compiled", trace_only)


@pytest.fixture
def clean_table() -> Iterator[None]:
    """The rules that a test enters for operations of its own are taken out again."""
    yield
    from jetplane import register
    from own_operations import OPS

    for op in OPS:
        with contextlib.suppress(ValueError):
            register.remove(op)


@pytest.fixture
def captures(caplog: pytest.LogCaptureFixture) -> Any:
    """Counts what is captured."""
    from compilation import Captures

    return Captures(caplog)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rooms", action="store_true", help="print the time of each folder's tests at the end")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--rooms"):
        return
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):  # set-up and tear-down are work of the room, too
                room = str(PurePosixPath(report.nodeid.split("::")[0]).parent)
                seconds[room] += report.duration
                tests[room] += report.when == "call"
    terminalreporter.section("time of each room")
    for room, spent in seconds.most_common():
        terminalreporter.line(f"{spent:8.1f} s  {tests[room]:5} tests  {room}")
