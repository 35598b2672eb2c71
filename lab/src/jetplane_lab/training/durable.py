"""Files that are whole or not there: written beside their place, flushed to the disk, and renamed."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from jetplane.errors import JetplaneError

__all__ = ["TEMPORARY", "NoSpace", "explained", "replace", "sync_folder"]

TEMPORARY = ".part"  # ends the names of files that are being written


class NoSpace(JetplaneError, OSError):
    """The disk is full."""


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Say in one sentence that there is no space left for ``path``, and that nothing is lost."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise NoSpace(
            f"there is no space left to write {path}; free some and go on with --resume: what was written before "
            "is whole."
        ) from error


def replace(path: Path, contents: bytes, keep: Path | None = None) -> None:
    """Let ``path`` hold ``contents``; what it held before goes to ``keep``. A kill at any moment leaves whole files."""
    temporary = path.with_name(path.name + TEMPORARY)
    with explained(path):
        try:
            with temporary.open("wb") as file:
                file.write(contents)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
