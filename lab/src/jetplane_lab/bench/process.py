"""One task in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jetplane
import jetplane_lab

from . import peak as memory
from .task import Task

__all__ = ["end_all", "run"]

Result = dict[str, Any]

_running: set[subprocess.Popen[str]] = set()  # of all threads


def run(
    task: Task,
    expected: dict[str, Any] | None,
    fomoh: Path | None,
    timeout: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> Result:
    """The result of a task; whatever goes wrong with the process is a result as well.

    ``interrupted`` is asked once :func:`end_all` can see the process: one that was called a moment before could not.
    """
    order = {"task": task.plain(), "expected": expected, "fomoh": None if fomoh is None else str(fomoh.resolve())}
    process = subprocess.Popen(
        [sys.executable, "-m", "jetplane_lab.bench.measure"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(task),
        start_new_session=True,  # so that compilers it started end with it
    )
    _running.add(process)
    if interrupted():
        _kill(process)
    try:
        out, errors = process.communicate(json.dumps(order), timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"it took longer than {timeout:g} s"}
    finally:
        _running.discard(process)
        _end(process)
    return _answer(process.returncode, out, errors)


def end_all() -> None:
    """End the processes of all threads, whose results then say so."""
    for process in list(_running):
        _kill(process)


def _answer(code: int, out: str, errors: str) -> Result:
    if code == 0:
        try:
            answer = json.loads(out)
        except json.JSONDecodeError:
            answer = None
        if isinstance(answer, dict) and "status" in answer:
            return answer
    if code < 0:
        name = signal.Signals(-code).name
        why = ", perhaps for want of memory" if name == "SIGKILL" else ""
        return {"status": "failed", "reason": f"the process ended with {name}{why}"}
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "without a word")
    return {"status": "failed", "reason": f"the process ended with status {code}: {last}"[:300]}


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and what it started, if it has not ended by itself."""
    if process.poll() is None:
        _kill(process)
        process.communicate()


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the session is its own, so the group is no one else's


def _environment(task: Task) -> dict[str, str]:
    found = dict(os.environ)
    packages = [str(Path(file).parents[1]) for file in (jetplane.__file__, jetplane_lab.__file__)]
    found["PYTHONPATH"] = os.pathsep.join(part for part in (*packages, found.get("PYTHONPATH")) if part)
    found["OMP_NUM_THREADS"] = str(task.threads)
    found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # or JAX's peak would be most of the device
    found["TF_CPP_MIN_LOG_LEVEL"] = "3"
    if task.does == "memory":
        found |= memory.ENVIRONMENT
    return found
