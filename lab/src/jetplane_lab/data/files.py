"""Where our files lie, and writing one so that a reader sees the old content or the new, never a part."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["VARIABLE", "cache", "write"]

VARIABLE = "JETPLANE_DATA"  # names a folder of the user's, which is never written to


def cache() -> Path:
    """Our cache: in ``XDG_CACHE_HOME``, or in ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"  # XDG: a relative path is to be ignored
    return root / "jetplane"


def write(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` by way of a temporary file beside it; missing folders are made."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; expected a file to write.")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # mkstemp makes files that nobody else can read
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
