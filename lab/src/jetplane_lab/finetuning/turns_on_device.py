"""Processes that share a device, of which one may have it to itself for a while, to take a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..training.callbacks import Callback

__all__ = ["Courteous", "Turns"]


class Turns:
    """Many at once, or one alone: two locked files in a folder that all processes know.

    Who waits to be alone holds the door, so that nobody else comes in before.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     turns = Turns(Path(folder))
        ...     with turns.together():
        ...         pass
        ...     with turns.alone():
        ...         sorted(path.name for path in Path(folder).iterdir())
        ['.door', '.room']
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._door, self._room = folder / ".door", folder / ".room"

    def waited_for(self) -> bool:
        """Whether somebody stands at the door."""
        handle = os.open(self._door, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Beside others; wait for the device inside, so that nothing is left on it afterwards."""
        with _locked(self._room, fcntl.LOCK_SH, door=self._door):
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else is inside."""
        with _locked(self._room, fcntl.LOCK_EX, door=self._door):
            yield


class Courteous(Callback):
    """Runs of one process that make room, between their epochs, for a process that wants the device to itself."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._runs, self._held = turns, 0, contextlib.ExitStack()

    def begin(self, run: Any) -> None:
        """The first run goes in."""
        if not self._runs:
            self._held.enter_context(self._turns.together())
        self._runs += 1

    def batch(self, run: Any, done: int, total: int) -> None:
        """Out and in again, where somebody waits."""
        if self._turns.waited_for():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._held.close()
            self._held.enter_context(self._turns.together())

    def end(self, run: Any, summary: Any) -> None:
        """The last run goes out."""
        self._runs -= 1
        if not self._runs:
            self._held.close()


@contextlib.contextmanager
def _locked(path: Path, how: int, door: Path | None = None) -> Iterator[None]:
    """A lock on a file, released when it is closed, also by a kill; through the door first, which is then let go."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with contextlib.nullcontext() if door is None else _locked(door, fcntl.LOCK_EX):
            fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)
