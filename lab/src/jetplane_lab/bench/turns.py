"""Processes that prepare do so side by side; one that looks at a clock has the machine for itself.

All lock one file of the user's, shared or exclusively, so two runs do not disturb each other either. Any other program
can take part: ``flock --shared FILE command`` keeps the clocks waiting until the command has ended.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import TracebackType

try:
    import fcntl
except ImportError:  # not a Unix: a run has one process at a time there
    fcntl = None  # type: ignore[assignment]

__all__ = ["AVAILABLE", "Turn", "path"]

AVAILABLE = fcntl is not None


def path() -> Path:
    """The file that is locked."""
    return Path(tempfile.gettempdir()) / f"jetplane-bench-{os.getuid() if AVAILABLE else 0}.lock"


class Turn:
    """What a process may do now; it ends with the ``with`` block, or with the process."""

    def __enter__(self) -> Turn:
        self._file = os.open(path(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600) if AVAILABLE else None
        return self

    def together(self) -> None:
        """Prepare, while others may do so as well, and no one measures."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def alone(self) -> None:
        """Measure, while no other process prepares or measures."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.close(self._file)  # which unlocks it
