"""A program in a process of its own, with a limit of time and memory."""

from __future__ import annotations

import io
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["forked"]


def forked(work: Callable[[], dict[str, Any]], seconds: float, gigabytes: float = 8.0) -> dict[str, Any]:
    """What ``work`` returns in a child, or how the child ended."""
    read, write = os.pipe()
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(read)
        _child(work, write, gigabytes)
    os.close(write)
    text = _received(read, begun + seconds)
    os.close(read)
    if text is None:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    spent = round(time.monotonic() - begun, 1)
    if text is None:
        return {"result": "not built", "words": f"it took more than {seconds:g} seconds", "seconds": spent}
    if not text:
        return {"result": "not built", "words": f"its process ended with status {status}", "seconds": spent}
    return {**json.loads(text), "seconds": spent}


def _child(work: Callable[[], dict[str, Any]], write: int, gigabytes: float) -> None:
    try:
        limit = int(gigabytes * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        sys.stdout = sys.stderr = io.StringIO()
        with os.fdopen(write, "w") as file:
            file.write(json.dumps(work()))
    finally:
        os._exit(0)


def _received(read: int, until: float) -> str | None:
    """All that comes through the pipe; None where it has not ended in time."""
    parts: list[bytes] = []
    while (left := until - time.monotonic()) > 0:
        ready, _, _ = select.select([read], [], [], left)
        if not ready:
            break
        part = os.read(read, 2**16)
        if not part:
            return b"".join(parts).decode()
        parts.append(part)
    return None
