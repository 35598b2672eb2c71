"""The bytes of a journal: an append-only file of checked frames, and what is good of one that was cut off or damaged.

    file     magic (8)  format (4)  frame of the header  frame of a record  ...
    frame    marker (4)  length (4)  CRC-32 of length and payload (4)  payload
    payload  CRC-32 of the frame before (4)  place in the file where its commit begins (8)  body

All numbers are little-endian. Frames are written a commit at a time, and flushed to the disk before the next commit
begins. So what a crash tears is in the last commit alone: where a frame is not good and one of a later commit is, the
file was damaged.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import JournalDamaged, JournalRefused

__all__ = ["FORMAT", "FramedBytes", "Frames", "begin", "enframed", "scan"]

FORMAT = 1
_MAGIC = b"\x89JPJ\r\n\x1a\n"  # shows where a transfer as text has changed it
_MARKER = b"\xa5\x96JR"  # no text holds it
_START, _FRAME, _LINK = struct.Struct("<8sI"), struct.Struct("<4sII"), struct.Struct("<IQ")


class FramedBytes(NamedTuple):
    """A good frame."""

    position: int
    crc: int
    before: int  # CRC of the frame before
    commit: int  # place in the file where its commit begins
    body: bytes

    @property
    def end(self) -> int:
        return self.position + _FRAME.size + _LINK.size + len(self.body)


class Frames(NamedTuple):
    """What is good of a file."""

    header: FramedBytes
    records: list[FramedBytes]
    torn: int  # bytes after them, which a crash has left

    @property
    def end(self) -> int:
        """Where the next frame belongs."""
        return (self.records[-1] if self.records else self.header).end


def begin(header: bytes) -> bytes:
    """The first bytes of a file."""
    return _START.pack(_MAGIC, FORMAT) + enframed(header, 0, 0)[0]


def enframed(body: bytes, before: int, commit: int) -> tuple[bytes, int]:
    """The frame of a body, and its CRC."""
    payload = _LINK.pack(before, commit) + body
    crc = _crc(len(payload), payload)
    return _FRAME.pack(_MARKER, len(payload), crc) + payload, crc


def scan(data: bytes, path: Path) -> Frames:
    """The good frames of a file. What a crash has torn off its end is left out; damage is refused with its place."""
    if data[: len(_MAGIC)] != _MAGIC[: len(data)] or len(data) < _START.size:
        place = next((n for n, (a, b) in enumerate(zip(data, _MAGIC, strict=False)) if a != b), len(data))
        raise JournalDamaged(f"{path} is no journal, or damaged at byte {place}; expected one that a Journal wrote.")
    if (found := _START.unpack_from(data)[1]) != FORMAT:
        raise JournalRefused(f"{path} has format {found} at byte {len(_MAGIC)}; expected format {FORMAT}.")
    header = _frame(data, _START.size)
    if header is None or header.before or header.commit:
        raise JournalDamaged(f"{path} is damaged at byte {_START.size}: its header is not what was written.")
    records: list[FramedBytes] = []
    last = header
    while last.end < len(data):
        frame = _frame(data, last.end)
        if frame is None:
            _check_torn(data, last.end, path)
            break
        if frame.before != last.crc:
            raise JournalDamaged(f"{path} is damaged at byte {last.end}: a record is not the one after that before it.")
        records.append(frame)
        last = frame
    return Frames(header, records, len(data) - last.end)


def _check_torn(data: bytes, position: int, path: Path) -> None:
    """Raise unless nothing behind a bad frame was written later than its commit."""
    for frame in _later(data, position):
        if frame.commit > position:
            raise JournalDamaged(
                f"{path} is damaged at byte {position}: the record there is not what was written, and that at byte "
                f"{frame.position}, which was written later, is good."
            )


def _later(data: bytes, position: int) -> Iterator[FramedBytes]:
    """All good frames that begin behind a place."""
    while (position := data.find(_MARKER, position + 1)) >= 0:
        frame = _frame(data, position)
        if frame is not None:
            yield frame


def _frame(data: bytes, position: int) -> FramedBytes | None:
    """The frame at a place, None where it is not good."""
    if position + _FRAME.size > len(data):
        return None
    marker, length, crc = _FRAME.unpack_from(data, position)
    start = position + _FRAME.size
    if marker != _MARKER or length < _LINK.size or start + length > len(data):
        return None
    payload = data[start : start + length]
    if _crc(length, payload) != crc:
        return None
    before, commit = _LINK.unpack_from(payload)
    return FramedBytes(position, crc, before, commit, payload[_LINK.size :])


def _crc(length: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(length.to_bytes(4, "little")))
