"""Whether a file holds what it must: the one way from bytes on disk, or from a mirror, to data that may be used."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from torch import Tensor

from . import idx
from .errors import DamagedData, MalformedFile
from .known import File

__all__ = ["Content", "content", "sha256"]


class Content(NamedTuple):
    """The checked content of one file."""

    array: Tensor  # uint8
    idx: bytes  # the file, not compressed
    sha256: str  # of the above
    verified: bool  # against a hash; otherwise only its structure could be checked


def sha256(raw: bytes) -> str:
    """The SHA-256 in hexadecimal digits."""
    return hashlib.sha256(raw).hexdigest()


def content(file: File, raw: bytes, where: str, published: bool) -> Content:
    """The content of ``raw``, plain or gzip, if it is that of ``file``; otherwise DamagedData says what is wrong.

    ``where`` names the file in messages. ``published`` demands the .gz file byte for byte as published where no hash
    of its content is known; without it a file that somebody compressed anew is taken if its structure is right.
    """
    try:
        plain = idx.unpack(raw, idx.size(file.shape))
        array = idx.decode(plain)
        _check_structure(file, array)
    except MalformedFile as error:
        expected = file.sha256 or file.published
        of = "content" if file.sha256 else ".gz file"
        raise DamagedData(
            f"{where} is damaged: {error}; the SHA-256 of the file is {sha256(raw)}, expected for the {of} {expected}"
        ) from error
    digest = sha256(plain)
    as_published = file.published is not None and sha256(raw) == file.published
    if file.sha256 is not None and digest != file.sha256:
        raise DamagedData(f"{where} is damaged: the SHA-256 of its content is {digest}, expected {file.sha256}")
    if file.not_sha256 is not None and digest == file.not_sha256:
        raise DamagedData(
            f"{where} holds MNIST's digits, whose files have the same names; the SHA-256 of its content is {digest}, "
            f"expected for the .gz file {file.published}"
        )
    if published and file.published is not None and not as_published:
        raise DamagedData(
            f"{where} is damaged: the SHA-256 of the .gz file is {sha256(raw)}, expected {file.published}"
        )
    return Content(array, plain, digest, verified=file.sha256 is not None or as_published)


def _check_structure(file: File, array: Tensor) -> None:
    if tuple(array.shape) != file.shape:
        found, expected = (" x ".join(map(str, shape)) for shape in (array.shape, file.shape))
        raise MalformedFile(f"it holds {found} values, expected {expected}")
    if array.dim() == 1 and int(array.max()) > 9:
        raise MalformedFile(f"it holds the label {int(array.max())}, expected 0 to 9")
