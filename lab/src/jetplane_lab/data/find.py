"""Where the files of a dataset lie, in the order in which they are looked for, and reading them from there."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal, NamedTuple

from . import check, cifar, files
from .errors import DamagedData, DataNotFound
from .fetch import fetch
from .files import VARIABLE
from .known import File, Known

__all__ = ["VARIABLE", "Place", "obtain", "own", "place", "read"]

_log = logging.getLogger(__name__)


class Place(NamedTuple):
    """A folder with the files of a dataset: the user's, which is never written to, our cache, or the package's."""

    folder: Path
    kind: Literal["user", "cache", "package"]

    def path(self, file: File) -> Path:
        """Where the file lies, or should: plain files of the user's come first, then compressed ones, then bundles."""
        plain, packed = self.folder / file.name, self.folder / f"{file.name}.gz"
        if self.kind != "user" or packed.is_file():
            return plain if self.kind == "user" and plain.is_file() else packed
        others = (self.folder / name for name in file.bundles)
        return next((path for path in (plain, *others) if path.exists()), packed)


def own(known: Known) -> Place:
    """The package, or our cache in ``XDG_CACHE_HOME`` or ``~/.cache``: the folders that hold what we have put there."""
    if not known.folders:
        return Place(Path(__file__).parent / known.name, "package")
    return Place(files.cache() / known.name, "cache")


def place(known: Known, data_dir: str | os.PathLike[str] | None = None) -> Place:
    """Where to read the dataset from: ``data_dir`` if given, ``JETPLANE_DATA`` if it has the files, or the cache."""
    if not known.folders:
        return own(known)
    if data_dir is not None:
        found = _user(known, Path(data_dir).expanduser(), "the data folder")
        if found is None:
            names = ", ".join(file.name for file in known.files)
            raise DataNotFound(f"{data_dir} holds none of the files of {known.title}: {names}, plain or .gz")
        return found
    if variable := os.environ.get(VARIABLE):
        found = _user(known, Path(variable).expanduser(), VARIABLE)
        if found is not None:
            return found
    return own(known)


def _user(known: Known, root: Path, what: str) -> Place | None:
    if not root.is_dir():
        raise ValueError(f"{what} is {str(root)!r}; expected a folder that exists")
    for name in known.folders:
        found = Place(root / name, "user")
        if any(found.path(file).exists() for file in known.files):
            return found
    return None


def read(at: Place, file: File) -> check.Content:
    """The checked content of a file; DataNotFound or DamagedData says what is wrong."""
    path = at.path(file)
    if path.name in file.bundles and path.exists():
        plain = cifar.contents(path, path.stat().st_mtime_ns)[file.name]
        return check.content(file, plain, f"{file.name} of {path}", published=False)
    if not path.is_file():
        raise DataNotFound(f"{path} is not there")
    return check.content(file, path.read_bytes(), str(path), published=at.kind == "cache")


def obtain(known: Known, at: Place, download: bool) -> tuple[dict[str, check.Content], str]:
    """The checked contents of all files, and where they came from.

    With ``download``, what the cache lacks, or holds damaged, is fetched and put there; elsewhere nothing is changed.
    """
    contents: dict[str, check.Content] = {}
    wanted: list[File] = []
    for file in known.files:
        try:
            contents[file.name] = read(at, file)
        except (DataNotFound, DamagedData) as error:
            if at.kind != "cache":
                raise
            if not download:
                raise type(error)(f"{error}; jetplane data --dataset {known.name} --fetch gets it") from error
            if isinstance(error, DamagedData):
                _log.warning("%s; fetching it again", error)
            wanted.append(file)
    cifar.contents.cache_clear()  # it is large, and all of it was read
    origins: dict[str, None] = {}  # a set that keeps its order
    if wanted:
        for file, raw, content, origin in fetch(known, wanted):
            contents[file.name] = content
            origins[origin] = None
            try:
                files.write(at.path(file), raw)
            except OSError as error:  # no space left, or a folder that is not ours: the data itself is good
                _log.warning("%s cannot be kept in the cache: %s", at.path(file), error)
    source = "the package" if at.kind == "package" else str(at.folder)
    return contents, f"{source} (fetched from {', '.join(origins)})" if origins else source
