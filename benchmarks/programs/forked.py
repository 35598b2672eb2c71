"""Programs in processes of their own, several at a time, with limits of time and memory."""

from __future__ import annotations

import io
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Task", "forked"]

Task = tuple[str, Callable[[], dict[str, Any]]]  # a name, and what is done in a child
_GIGABYTES = 8.0  # beside what the parent has: libraries for CUDA take many addresses


@dataclass(eq=False)
class _Child:
    name: str
    process: int
    pipe: int
    begun: float
    parts: list[bytes] = field(default_factory=list)

    def read(self) -> bool:
        """Take what has come through the pipe; whether that was the end."""
        part = os.read(self.pipe, 2**16)
        self.parts.append(part)
        return not part

    def ended(self, seconds: float | None = None) -> dict[str, Any]:
        """What it returned, or how it ended; with ``seconds`` it had no more time."""
        os.close(self.pipe)
        if seconds is not None:
            os.kill(self.process, signal.SIGKILL)
        _, status = os.waitpid(self.process, 0)
        spent, text = round(time.monotonic() - self.begun, 1), b"".join(self.parts).decode()
        if seconds is not None:
            return {"result": "not built", "words": f"it took more than {seconds:g} seconds", "seconds": spent}
        if not text:
            return {"result": "not built", "words": f"its process ended with status {status}", "seconds": spent}
        return {**json.loads(text), "seconds": spent}


def forked(
    tasks: Iterable[Task], jobs: int, seconds: float, until: float | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each task what it returns in a child, or how the child ended, as they end; ``jobs`` run at a time.

    At ``until``, of the monotonic clock, no more are begun, and those that run are ended without a word.
    """
    left, running = iter(tasks), list[_Child]()
    try:
        while True:
            open_still = until is None or time.monotonic() < until
            while open_still and len(running) < jobs and (task := next(left, None)) is not None:
                running.append(_begun(*task))
            if not running or not open_still:
                return
            yield from _waited(running, seconds)
    finally:
        for child in running:
            child.ended(0.0)


def _waited(running: list[_Child], seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those that end soon, which are taken out."""
    ready, _, _ = select.select([child.pipe for child in running], [], [], 0.2)
    now = time.monotonic()
    for child in [*running]:
        if child.pipe in ready and child.read():
            running.remove(child)
            yield child.name, child.ended()
        elif now - child.begun > seconds:
            running.remove(child)
            yield child.name, child.ended(seconds)


def _begun(name: str, work: Callable[[], dict[str, Any]]) -> _Child:
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        _work(work, write)
    os.close(write)
    return _Child(name, process, read, time.monotonic())


def _work(work: Callable[[], dict[str, Any]], write: int) -> None:
    try:
        limit = int(_GIGABYTES * 2**30) + _addresses()
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        sys.stdout = sys.stderr = io.StringIO()
        with os.fdopen(write, "w") as file:
            file.write(json.dumps(work()))
    finally:
        os._exit(0)


def _addresses() -> int:
    """The bytes of addresses that this process has taken."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
