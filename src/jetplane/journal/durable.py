"""Files and folders that a kill or a power cut leaves whole: written beside their place, flushed, and renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import JournalRefused

__all__ = ["locked", "remove", "replace", "sync", "sync_folder", "tidy"]

_UNFINISHED = ".unfinished-"  # begins names of folders in which a file is being written, and what its writer needs


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``path`` be the file that ``write`` makes at the place it is given; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=path.parent) as folder:
        temporary = Path(folder, path.name)
        write(temporary)
        temporary.chmod(0o644)  # some make files that nobody else can read
        sync(temporary)
        os.replace(temporary, path)
    sync_folder(path.parent)


def tidy(folder: Path) -> None:
    """Remove what a kill has left unfinished."""
    for path in folder.glob(_UNFINISHED + "*"):
        shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(paths: list[Path]) -> None:
    """Remove files for good."""
    for path in paths:
        path.unlink(missing_ok=True)
    for folder in {path.parent for path in paths}:
        sync_folder(folder)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else writes in the folder, inside. The lock goes with its process."""
    try:
        import fcntl  # not everywhere
    except ImportError:
        raise JournalRefused("a journal needs file locks (fcntl), and this system has none.") from None
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalRefused(
                f"the journal in {folder} is being written already; expected one writer at a time."
            ) from None
        yield
    finally:
        os.close(handle)
