"""Writing files so that a reader sees the old contents or the new, never a part."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` by way of a temporary file beside it; missing folders are made."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; expected a file to write.")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes files that nobody else can read
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
