"""One step as bytes: what its update was made of, how it came out, and what the run was told of it.

Numbers are little-endian, one fixed block and then the parts that the flags name, in the order of the flags.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from enum import IntFlag
from typing import Any, NamedTuple

from torch import Tensor

from ..directions import Size
from ..solvers import Status
from .raw_bytes import DIGEST, bytes_of, dtype_of, name_of, tensor_of

__all__ = ["StepRecord", "decode", "encode"]

_CODES = tuple(Status)
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_FIXED = struct.Struct("<QQddIIIHHBH")


class StepRecord(NamedTuple):
    """A step that was taken."""

    step: int  # its number, from 0
    seed: int
    status: Status
    loss: float  # before it
    coefficients: Tensor  # (planes, K), as the solver gave them
    factor: float  # on the update, by clipping and backtracking
    block: int | None  # how many directions are summed up at a time; None: all
    lrs: Sequence[float]  # of the groups
    decays: Sequence[float]
    bad: int  # steps in a row, up to this one, that could not move the parameters
    solver_state: float | None = None  # after it
    size: Size | None = None  # likewise, of directions that change their number
    slopes: Tensor | None = None  # (planes, K), where directions learn from them
    moving: Sequence[bool] | None = None  # of each parameter: whether it required grad; None: all
    used: Sequence[bool] | None = None  # of each of those that did: whether the closure read it; None: all
    place: Any = None  # in the order of the data, as the caller gave it
    buffers: dict[int, bytes] = {}  # noqa: RUF012  # those that it changed, by number: what they hold after it
    digest: bytes | None = None  # of parameters, buffers and memory after it
    absent: Sequence[int] = ()  # processes of a quorum that were left out of it


class _Has(IntFlag):
    SOLVER_STATE = 1
    SIZE = 2
    SLOPES = 4
    MOVING = 8
    USED = 16
    PLACE = 32
    BUFFERS = 64
    DIGEST = 128
    ABSENT = 256


def encode(record: StepRecord) -> bytes:
    """The body of a record's frame."""
    planes, k = record.coefficients.shape
    parts = {
        _Has.SOLVER_STATE: None if record.solver_state is None else struct.pack("<d", record.solver_state),
        _Has.SIZE: None if record.size is None else struct.pack("<Id", *record.size),
        _Has.SLOPES: None if record.slopes is None else _typed(record.slopes),
        _Has.MOVING: _mask(record.moving),
        _Has.USED: _mask(record.used),
        _Has.PLACE: None if record.place is None else _sized(json.dumps(record.place).encode()),
        _Has.BUFFERS: _buffers(record.buffers) if record.buffers else None,
        _Has.DIGEST: record.digest,
        _Has.ABSENT: _sized(struct.pack(f"<{len(record.absent)}I", *record.absent)) if record.absent else None,
    }
    flags = sum(flag for flag, part in parts.items() if part is not None)
    fixed = _FIXED.pack(
        *(record.step, record.seed, record.loss, record.factor, record.block or 0, record.bad, k),
        *(planes % (1 << 16), len(record.lrs), _CODES.index(record.status), flags),
    )
    rates = struct.pack(f"<{2 * len(record.lrs)}d", *record.lrs, *record.decays)
    found = [part for part in parts.values() if part is not None]
    return b"".join([fixed, rates, _typed(record.coefficients), *found])


def decode(body: bytes) -> StepRecord:
    """The record in the body of a frame."""
    read = _Reader(body)
    step, seed, loss, factor, block, bad, k, planes, groups, code, flags = read.numbers(_FIXED.format)
    rates = read.numbers(f"<{2 * groups}d")
    shape = planes or 1 << 16, k
    return StepRecord(
        step=step,
        seed=seed,
        status=_CODES[code],
        loss=loss,
        coefficients=read.tensor(shape),
        factor=factor,
        block=block or None,
        lrs=rates[:groups],
        decays=rates[groups:],
        bad=bad,
        solver_state=read.numbers("<d")[0] if flags & _Has.SOLVER_STATE else None,
        size=read.numbers("<Id") if flags & _Has.SIZE else None,
        slopes=read.tensor(shape) if flags & _Has.SLOPES else None,
        moving=read.mask() if flags & _Has.MOVING else None,
        used=read.mask() if flags & _Has.USED else None,
        place=json.loads(read.sized()) if flags & _Has.PLACE else None,
        buffers=read.buffers() if flags & _Has.BUFFERS else {},
        digest=read.some(DIGEST) if flags & _Has.DIGEST else None,
        absent=read.ranks() if flags & _Has.ABSENT else (),
    )


class _Reader:
    """Takes a body apart, from its front."""

    def __init__(self, body: bytes) -> None:
        self._body, self._place = body, 0

    def some(self, count: int) -> bytes:
        self._place += count
        return self._body[self._place - count : self._place]

    def numbers(self, layout: str) -> Any:
        return struct.unpack(layout, self.some(struct.calcsize(layout)))

    def tensor(self, shape: tuple[int, int]) -> Tensor:
        dtype = dtype_of(_DTYPES[self.some(1)[0]])
        return tensor_of(self.some(shape[0] * shape[1] * dtype.itemsize), dtype, shape)

    def sized(self) -> bytes:
        return self.some(self.numbers("<I")[0])

    def mask(self) -> list[bool]:
        return [bool(one) for one in self.sized()]

    def ranks(self) -> tuple[int, ...]:
        data = self.sized()
        return struct.unpack(f"<{len(data) // 4}I", data)

    def buffers(self) -> dict[int, bytes]:
        return {self.numbers("<I")[0]: self.sized() for _ in range(self.numbers("<I")[0])}


def _typed(numbers: Tensor) -> bytes:
    return bytes([_DTYPES.index(name_of(numbers.dtype))]) + bytes_of(numbers)


def _sized(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _mask(flags: Sequence[bool] | None) -> bytes | None:
    return None if flags is None else _sized(bytes(flags))


def _buffers(changed: dict[int, bytes]) -> bytes:
    parts = [struct.pack("<I", number) + _sized(data) for number, data in changed.items()]
    return struct.pack("<I", len(parts)) + b"".join(parts)
