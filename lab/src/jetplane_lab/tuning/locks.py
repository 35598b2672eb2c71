"""Locks on files that the system lets go when their holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["alive", "hold", "locked"]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock of ``path``, and hold it inside."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def hold(path: Path) -> int:
    """Take the lock of a new file for as long as the process lives or until the handle is closed."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def alive(path: Path) -> bool:
    """Whether some process holds the lock of ``path``."""
    try:
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
