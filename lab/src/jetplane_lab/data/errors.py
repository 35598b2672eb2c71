"""What can be wrong with a dataset. A wrong argument is a plain ValueError."""

from __future__ import annotations

from jetplane.errors import JetplaneError


class DataError(JetplaneError, RuntimeError):
    """A dataset cannot be had."""


class MalformedFile(DataError):
    """The bytes of a file are not what its format says; the message is the reason alone, without the file's name."""


class DamagedData(DataError):
    """A file is there, but its content is not the dataset's. It names the file, its SHA-256 and the one expected."""


class DataNotFound(DataError):
    """The files are neither on this machine nor to be fetched."""
