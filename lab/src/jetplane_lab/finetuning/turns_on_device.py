"""Processes that share a device, of which one may have it to itself for a while, to take a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Turns"]


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
