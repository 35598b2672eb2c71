"""One measurement in this process: ``python -m jetplane_lab.bench.measure`` with a JSON order on stdin, JSON on stdout.

The order is ``{"task": ..., "expected": ..., "fomoh": ...}``; the answer has a ``status``: "ok", "wrong" (with the
error; a wrong system is not timed) or "failed" (with the reason).
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from . import clock, oracle, roofline
from . import peak as memory
from . import tolerances as precision
from .problem import Problem
from .steps import STEPS, step_error
from .systems import Prepared, Setting, System, find, jax_peer
from .task import Task
from .turns import Turn

__all__ = ["main", "run"]

Result = dict[str, Any]
Meter = memory.CudaPeak | jax_peer.AllocatorPeak


def run(task: Task, expected: dict[str, Any] | None = None, fomoh: Path | None = None) -> Result:
    """Do what a task says, and return its result."""
    torch.set_num_threads(task.threads)
    precision.apply(task.precision)
    with Turn() as turn:
        return _run(task, expected, fomoh, turn)


def _run(task: Task, expected: dict[str, Any] | None, fomoh: Path | None, turn: Turn) -> Result:
    if task.does == "ceilings":
        turn.alone()
        return {"status": "ok", **roofline.ceilings(task.precision, task.device)}
    if task.does == "oracle":
        turn.together()
        return _oracle(task)
    setting = Setting(task.model, task.device, fomoh)
    system = STEPS[task.system] if task.what == "step" else find(task.system)
    why = system.missing(setting)
    if why is not None:
        raise RuntimeError(why)
    if system.library == "jax":
        jax_peer.configure(task.precision, task.device)
    measured = task.does != "check"
    if measured and system.library == "jax":
        turn.alone()  # its compiler chooses by timing
    else:
        turn.together()
    if task.what == "step" and task.does == "check":
        error = step_error(task.system, task.k, task.model, task.depth, task.batch, task.device)
        return _judged(error, precision.tolerance("float64"))
    # JAX has the device for itself: torch keeps its copy of the problem on the CPU
    problem = _problem(task, "cpu" if system.library == "jax" else task.device)
    prepared, meter = _prepared(system, problem, setting, task.device.startswith("cuda"))
    result, seconds = clock.first_call(prepared.call, prepared.wait)
    judged: Result = {"status": "ok"}
    if expected is not None:
        error = oracle.relative_error(prepared.read(result), oracle.of_plain(expected["plane"]))
        allowed = precision.tolerance(task.precision, expected["rounding"])
        judged = _judged(error, max(allowed, system.accuracy))
    del result
    if judged["status"] == "ok" and measured:
        turn.alone()
        judged["first_call_s"] = round(seconds, 4)
        judged |= _measured(task, system, prepared, meter)
        if not all(bool(p.isfinite().all()) for p in problem.params.values()):
            return {"status": "wrong", "reason": "the parameters are not finite after the steps that were timed"}
    return judged


def _prepared(system: System, problem: Problem, setting: Setting, cuda: bool) -> tuple[Prepared, Meter | None]:
    """What is to be called, and the meter of a device's memory, whose count begins now."""
    meter: Meter | None = None
    if cuda and system.library == "torch":
        with torch.no_grad():
            problem.loss()  # the workspaces of torch's libraries are there from the first product on
        meter = memory.CudaPeak()
    prepared = system.prepare(problem, setting)
    if cuda and system.library == "jax":
        meter = jax_peer.AllocatorPeak()  # the arguments are on the device now
    return prepared, meter


def _problem(task: Task, device: str) -> Problem:
    return Problem(task.model, task.k, task.batch, task.depth, precision.dtype(task.precision), device)


def _oracle(task: Task) -> Result:
    """The plane in float64, the rounding error of the same at the task's precision, and the counts of a pass."""
    exact = _problem(task.but(precision="float64"), task.device)
    plane = oracle.reference(exact)
    if not oracle.finite(plane):
        raise RuntimeError("the reference is not finite; expected a problem with finite derivatives")
    del exact
    problem = _problem(task, task.device)
    rounding = oracle.relative_error(oracle.reference(problem), plane)
    return {
        "status": "ok",
        "plane": oracle.plain(plane),
        "rounding": rounding if math.isfinite(rounding) else 0.0,
        "count": roofline.count(problem, task.device),
    }


def _judged(error: float, tolerance: float) -> Result:
    if error <= tolerance:
        return {"status": "ok", "error": error, "tolerance": tolerance}
    size = f"{error:.1e}" if math.isfinite(error) else "a number that is not finite"
    reason = f"it differs from double backward by {size}, and {tolerance:.1e} is allowed"
    return {"status": "wrong", "reason": reason, "error": error if math.isfinite(error) else None}


def _measured(task: Task, system: System, prepared: Prepared, meter: Meter | None) -> Result:
    found: Result = {}
    if task.does in ("time", "both"):
        times, inner = clock.sample(prepared.call, prepared.wait, task.repeats, task.seconds)
        found |= {**clock.summary([time / prepared.steps for time in times]), "calls_per_sample": inner}
        if prepared.steps > 1:
            found["steps_per_call"] = prepared.steps
    planned = prepared.planned()
    if planned is not None:
        found["planned_bytes"] = planned
    if task.does in ("memory", "both"):
        if meter is None:
            found["peak_bytes"] = memory.resident_peak(prepared.call, prepared.wait)
            if system.library == "torch":
                found["tensor_bytes"] = memory.tensor_peak(prepared.call)
        else:
            found["allocator_bytes"] = meter.read()
            # JAX's allocator also counts what autotuning tried while compiling, which a run does not need
            found["peak_bytes"] = found["allocator_bytes"] if planned is None else planned
    return found


def main() -> int:
    """Read the order, and answer it."""
    _end_with_parent()
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not mix with the answer
    order = json.load(sys.stdin)
    try:
        task = Task.of(order["task"])
        if task.device == "cpu":
            memory.limit()
            _pin(task.threads)
        result = run(task, order.get("expected"), Path(order["fomoh"]) if order.get("fomoh") else None)
    except Exception as error:
        traceback.print_exc()
        result = {"status": "failed", "reason": _reason(error)}
    json.dump(result, answer, allow_nan=False)
    answer.close()
    return 0


def _end_with_parent() -> None:
    """Let the kernel end this process if the run that ordered it is killed, or it would disturb the next one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _pin(threads: int) -> None:
    """Let all libraries of this process use the same number of cores; JAX knows no other way to be told."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def _reason(error: Exception) -> str:
    """The first line that says something, for a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text}"[:300].rstrip(": ")


if __name__ == "__main__":
    sys.exit(main())
