"""The commit that a folder of source code is at."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import jetplane

__all__ = ["Commit", "commit_of", "own_commit"]


class Commit(NamedTuple):
    """A commit, and whether files that it tracks differ from it."""

    name: str
    changed: bool


def commit_of(folder: Path) -> Commit | None:
    """The commit of a folder; None where git tracks nothing in it, or is not there.

    A package installed inside somebody else's repository is none of that repository's files.
    """
    try:
        name = _git(folder, "rev-parse", "HEAD")
        if not name or not _git(folder, "ls-files", "."):
            return None
        return Commit(name, bool(_git(folder, "status", "--porcelain", "--untracked-files=no", ".")))
    except OSError:  # there is no git
        return None


def own_commit() -> Commit | None:
    """That of the library; changed, too, where the study differs, for a result depends on both."""
    library = commit_of(Path(jetplane.__file__).resolve().parent)
    study = commit_of(Path(__file__).resolve().parent)
    if library is None or study is None:
        return library
    return Commit(library.name, library.changed or study.changed)


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
