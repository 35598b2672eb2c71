"""A whole run: references, checks, times and memory of all systems on all points, each in a process of its own."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jetplane_lab.records import Records

from . import process, roofline
from .problem import has_depth
from .steps import STEPS
from .systems import SYSTEMS, Setting, System
from .task import Point, Task

__all__ = ["CHECKS", "Found", "Plan", "Progress", "Row", "measure"]

Row = dict[str, Any]
Result = dict[str, Any]

# "auto": every system in float64 on a small batch, but what torch.compile makes of a peer by the peer itself;
# "float64": all of them; "timed": none. The timed problem is checked at its own precision in any case.
CHECKS = ("auto", "float64", "timed")
_CHECK_BATCH = 8
_START = {False: 5.0, True: 8.0}  # seconds until a process is at work, on the CPU and on CUDA
_COMPILE = 40.0  # seconds of torch.compile


class Progress:
    """What a run tells of itself; this one is silent."""

    def begin(self, total: int, seconds: float) -> None:
        """There will be at most ``total`` processes, which may take ``seconds``."""

    def skipped(self, point: Point, system: str, why: str) -> None:
        """A system cannot run on a point."""

    def done(self, task: Task, result: Result, number: int, left: float) -> None:
        """A process has ended; ``left`` seconds may remain."""


@dataclass(frozen=True)
class Plan:
    """What to measure, and how."""

    points: Sequence[Point]
    systems: Sequence[str] | None = None  # by name; None: all
    device: str = "cpu"
    threads: int = 1
    repeats: int = 7
    seconds: float = 0.5
    check: str = "auto"
    memory: int = 1  # processes that measure memory on the CPU; 0: none
    timeout: float = 900.0
    ahead: int = 1  # processes at a time: one measures, the others prepare
    fomoh: Path | None = None
    leave_out: frozenset[str] = field(default_factory=frozenset)  # systems that are left out unless named

    def candidates(self, point: Point) -> list[System]:
        """The systems that are wanted on a point."""
        table = STEPS if point.what == "step" else SYSTEMS
        if self.systems is None:
            return [system for name, system in table.items() if name not in self.leave_out]
        return [table[name] for name in self.systems if name in table]

    def task(self, does: str, point: Point, system: str, **changes: Any) -> Task:
        """A task of this plan."""
        task = Task(
            *(does, point.what, system, point.model, point.k, point.batch, point.depth, point.precision),
            device=self.device,
            threads=self.threads,
            repeats=self.repeats,
            seconds=self.seconds,
        )
        return task.but(**changes)

    # -- the tasks of a point ---------------------------------------------------------------------------------------

    def ceilings(self, precision: str) -> Task:
        """How fast the machine is."""
        point = Point("quadratic", "-", 0, 1, 1, precision)
        return self.task("ceilings", point, "-")

    def oracle(self, point: Point) -> Task:
        """The reference of a point."""
        return self.task("oracle", point._replace(what="quadratic"), "double-backward", repeats=1, seconds=0.0)

    def check_of(self, point: Point, system: System) -> Task | None:
        """What compares a system with the reference in float64 on a small batch, if that is wanted."""
        # a step has no check at the timed precision, so it always has this one
        if system.kind == "scale" or (self.check == "timed" and point.what != "step"):
            return None
        name = system.twin if system.twin is not None and self.check == "auto" else system.name
        # the authors' step is made of their plane; ours is checked as a step
        what = "step" if point.what == "step" and system.kind == "ours" else "quadratic"
        small = Point(what, point.model, point.depth, point.k, _CHECK_BATCH, "float64")
        return self.task("check", small, name, repeats=1, seconds=0.0)

    def measurements(self, point: Point, system: System) -> list[Task]:
        """What measures a system on a point: on the CPU time and memory in processes of their own."""
        if self.device.startswith("cuda"):
            return [self.task("both" if self.memory else "time", point, system.name)]
        memory = [
            self.task("memory", point, system.name, repeats=1, seconds=0.0, process=number)
            for number in range(self.memory)
        ]
        return [self.task("time", point, system.name), *memory]


def _guess(task: Task, compiled: bool) -> float:
    """Seconds that a process may take, to begin with."""
    seconds = _START[task.device.startswith("cuda")] + 2 * task.seconds + 1
    return seconds + (_COMPILE if compiled and task.does in ("time", "both") else 0.0)


class _Run:
    """Results by task, each made once, whichever thread asks first."""

    def __init__(self, plan: Plan, records: Records, progress: Progress) -> None:
        self.plan, self.records, self.progress = plan, records, progress
        self.lock = threading.Lock()  # of everything below, and of what is written and told
        self.turns: dict[str, threading.Lock] = defaultdict(threading.Lock)  # by key of a task
        self.interrupted = False
        self.expected: dict[str, float] = {}  # seconds by key of what is still to come
        self.number = 0
        self.spent = self.guessed = 0.0

    def announce(self) -> None:
        """Count the processes to come."""
        plan = self.plan
        for precision in dict.fromkeys(point.precision for point in plan.points if point.what == "quadratic"):
            self._expect(plan.ceilings(precision), False)
        for point in plan.points:
            if point.what == "quadratic":
                self._expect(plan.oracle(point), False)
            for system in self._present(point):
                check = plan.check_of(point, system)
                if check is not None:
                    if check.what == "quadratic":
                        self._expect(plan.oracle(Point(*check.point)), False)
                    self._expect(check, system.compiled and check.system == system.name)
                for task in plan.measurements(point, system):
                    self._expect(task, system.compiled and system.library == "torch")
        self.progress.begin(len(self.expected), sum(self.expected.values()))

    def _present(self, point: Point, tell: bool = False) -> list[System]:
        present = []
        for system in self.plan.candidates(point):
            why = system.missing(Setting(point.model, self.plan.device, self.plan.fomoh))
            if why is None:
                present.append(system)
            elif tell:
                self.progress.skipped(point, system.name, why)
        return present

    def _expect(self, task: Task, compiled: bool) -> None:
        known = self.records.rows.get(task.key)
        if known is None or known["result"]["status"] == "failed":
            self.expected[task.key] = _guess(task, compiled)

    def result(self, task: Task, expected: dict[str, Any] | None = None) -> Result:
        """The result of a task: an earlier one, or that of a new process; what failed before is tried again."""
        with self.lock:
            turn = self.turns[task.key]
        with turn:
            return self._result(task, expected)

    def _result(self, task: Task, expected: dict[str, Any] | None) -> Result:
        known = self.records.rows.get(task.key)
        if known is not None and (known["result"]["status"] != "failed" or task.key not in self.expected):
            return dict(known["result"])
        if self.interrupted:
            raise KeyboardInterrupt
        start = time.monotonic()
        result = process.run(task, expected, self.plan.fomoh, self.plan.timeout, lambda: self.interrupted)
        with self.lock:
            if self.interrupted:  # which may be what ended the process
                raise KeyboardInterrupt
            self.spent += time.monotonic() - start
            self.guessed += self.expected.pop(task.key, 0.0)
            self.records.add({"key": task.key, "task": task.plain(), "result": result})
            self.number += 1
            pace = self.spent / self.guessed if self.guessed else 1.0
            left = pace * sum(self.expected.values()) / self.plan.ahead
            self.progress.done(task, result, self.number, left)
        return result

    def interrupt(self) -> None:
        """Let the processes end, and no further one begin."""
        with self.lock:
            self.interrupted = True
        process.end_all()

    def _drop(self, tasks: Iterable[Task]) -> None:
        """There is no use in doing these."""
        with self.lock:
            for task in tasks:
                self.expected.pop(task.key, None)

    def row(self, point: Point, system: System) -> Row:
        """All that is known of a system on a point."""
        row: Row = {**point._asdict(), "system": system.name, "kind": system.kind}
        tasks = self.plan.measurements(point, system)
        bad = self._checked(point, system)
        reference = None if bad or point.what == "step" else self.result(self.plan.oracle(point))
        if not bad and reference is not None and reference["status"] != "ok":
            bad = {"status": "failed", "reason": f"there is no reference: {reference['reason']}"}
        if bad:
            self._drop(tasks)
            return row | bad
        needs = None if reference is None or system.kind == "scale" else reference
        results = []
        for task in tasks:
            results.append(self.result(task, needs))
            if results[-1]["status"] != "ok" and task.does != "memory":
                self._drop(tasks)
                break
        row |= _merged(results)
        if row["status"] == "ok" and system.kind == "ours" and reference is not None:
            machine = self.result(self.plan.ceilings(point.precision))
            if machine["status"] == "ok":
                row |= _floor(row, reference["count"], machine)
        return row

    def _checked(self, point: Point, system: System) -> Result | None:
        """What is wrong with a system, or None."""
        check = self.plan.check_of(point, system)
        if check is None:
            return None
        reference = None
        if check.what == "quadratic":
            reference = self.result(self.plan.oracle(Point(*check.point)))
            if reference["status"] != "ok":
                return {"status": "failed", "reason": f"there is no reference: {reference['reason']}"}
        found = self.result(check, reference)
        if found["status"] == "ok":
            return None
        return {"status": found["status"], "reason": f"its check in float64: {found['reason']}"}


def _merged(results: list[Result]) -> Row:
    """One row from the process that measured time and those that measured memory."""
    first, rest = results[0], results[1:]
    peaks = [found["peak_bytes"] for found in results if "peak_bytes" in found]
    row = {name: value for name, value in first.items() if not name.endswith("_bytes")}
    for name in ("tensor_bytes", "planned_bytes", "allocator_bytes"):
        values = [found[name] for found in results if name in found]
        if values:
            row[name.replace("_bytes", "_mib")] = _mib(statistics.median(values))
    if peaks:
        row["peak_mib"] = _mib(statistics.median(peaks))
    failed = next((found["reason"] for found in rest if found["status"] != "ok"), None)
    if failed is not None:
        row["memory_reason"] = failed
    return row


def _mib(size: float) -> float:
    return round(size / 2**20, 3)


def _floor(row: Row, counted: dict[str, int], machine: Result) -> Row:
    floor = roofline.floor_ms(counted, machine)
    return {**counted, "floor_ms": round(floor, 6), "over_floor": round(row["median_ms"] / floor, 3) if floor else None}


def _ranked(rows: list[Row]) -> None:
    """Enter every time's ratio to that of the fastest right peer on the same point."""
    peers = [row for row in rows if row["kind"] == "peer" and row["status"] == "ok"]
    best = min(peers, key=lambda row: row["median_ms"], default=None)
    for row in rows:
        if best is not None and row["status"] == "ok":
            row["best_peer"] = best["system"]
            row["to_best_peer"] = round(row["median_ms"] / best["median_ms"], 4)


@dataclass
class Found:
    """What a run has measured so far."""

    rows: list[Row] = field(default_factory=list)  # of all points in their order
    ceilings: dict[str, Result] = field(default_factory=dict)  # the machine's, by precision
    interrupted: bool = False


def measure(
    plan: Plan, records: Records, progress: Progress, on_point: Callable[[Point, list[Row]], None] | None = None
) -> Found:
    """All that is to be measured, or as much as there was time for until somebody interrupted."""
    run = _Run(plan, records, progress)
    run.announce()
    found = Found()
    with ThreadPoolExecutor(plan.ahead) as pool:
        try:
            precisions = dict.fromkeys(point.precision for point in plan.points if point.what == "quadratic")
            ceilings = {name: pool.submit(run.result, plan.ceilings(name)) for name in precisions}
            rows = {
                point: [pool.submit(run.row, point, system) for system in run._present(point, tell=True)]
                for point in plan.points
            }
            for name, machine in ceilings.items():
                found.ceilings[name] = machine.result()
            for point in plan.points:
                of_point: list[Row] = []
                try:
                    for row in rows[point]:
                        of_point.append(row.result())
                finally:
                    _ranked(of_point)
                    found.rows += of_point
                    if on_point is not None and of_point:
                        on_point(point, of_point)
        except KeyboardInterrupt:
            found.interrupted = True
            run.interrupt()
        finally:
            pool.shutdown(cancel_futures=True)
    return found


def describe(point: Point) -> str:
    """A point in words.

    Example:
        >>> describe(Point("quadratic", "mlp", 4, 3, 256, "float32"))
        'quadratic, mlp of depth 4, K=3, batch 256, float32'
    """
    model = f"{point.model} of depth {point.depth}" if has_depth(point.model) else point.model
    return f"{point.what}, {model}, K={point.k}, batch {point.batch}, {point.precision}"
