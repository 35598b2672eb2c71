"""A call of a forward gradient on one part of a batch: which samples it has, and what the other processes found."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import LostProcess, ProcessesDiffer
from .processes import Processes, named
from .tangents import Tangents

__all__ = ["Meeting", "Shard", "Talk"]

log = logging.getLogger("jetplane")

_SAID = 2  # numbers, in each of the two exchanges


class Shard(NamedTuple):
    """The place of some samples among those of a whole batch."""

    offset: int
    total: int
    numbers: int  # of noise, of the whole batch


class Meeting:
    """A call in a process that is alone. ``offset`` and ``total`` are its samples' place, where they are a part."""

    def __init__(self, offset: int | None = None, total: int | None = None) -> None:
        _check_count("offset", offset, 0)
        _check_count("total", total, 1)
        self._offset, self._total = offset, total
        self._shard: Shard | None = None
        self.tangents: Tangents | None = None  # the processes that share these samples' tangents

    @property
    def together(self) -> bool:
        """Whether there are other processes."""
        return False

    @property
    def whole(self) -> bool:
        """Whether this call has all samples of a batch, and nobody else takes part."""
        return not self.together and self._offset is None and self._total is None

    @property
    def offset(self) -> int:
        """The place of this process's first sample, once the samples are counted."""
        return 0 if self._shard is None else self._shard.offset

    def shard(self, samples: int, numbers: int) -> Shard | None:
        """Which part of a batch these ``samples``, with so many ``numbers`` of noise, are; None: all of it."""
        if self._offset is None and self._total is None:
            return None
        if self._offset is None or self._total is None:
            raise ValueError(
                f"offset is {self._offset} and total is {self._total}; expected both, the place of the first sample "
                "and the number of samples of the whole batch, or a process_group."
            )
        if self._offset + samples > self._total:
            raise ValueError(
                f"offset is {self._offset} and total {self._total} for {samples} samples; expected them to fit."
            )
        return Shard(self._offset, self._total, -(-numbers * self._total // samples))

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Around the call: where it fails the others are told."""
        yield

    def sums(self, tag: float, losses: Tensor, parts: Callable[[], Sequence[Tensor]]) -> list[Tensor] | None:
        """The sums of ``parts`` over the processes, all of which must have the same ``tag``; None where the losses of
        one are not finite, from which nothing follows."""
        return list(parts())

    def mean(self, losses: Tensor) -> Tensor:
        """The mean loss."""
        return losses.sum() / losses.shape[0]


class Talk(Meeting):
    """A call that all processes of a group make with parts of one batch; those of ``sharing`` with the same part."""

    def __init__(
        self, processes: Processes, what: str, offset: int | None, total: int | None, sharing: Processes | None = None
    ) -> None:
        super().__init__(offset, total)
        if total is not None:
            raise ValueError(
                f"total is {total} and there is a process_group, which counts the samples; expected one of them."
            )
        self._processes, self._what = processes, what
        self.tangents = None if sharing is None else Tangents(sharing, what)
        self._closed = False
        self._counted = 0  # samples that this process has said it has
        self._loss = 0.0

    @property
    def together(self) -> bool:
        return True

    def shard(self, samples: int, numbers: int) -> Shard:
        """That of this process: behind the samples of those before it, unless it was said where."""
        if self._shard is not None:  # a program that is planned anew
            if samples != self._counted:
                raise ValueError(
                    f"the batch has {samples} samples and {self._counted} were counted, as many as at the call before; "
                    "expected the batch as arguments of the call, where its size is seen before the passes."
                )
            return self._shard
        self._counted = samples
        mine = torch.tensor([samples, numbers], dtype=torch.float64, device="cpu")
        records = [[int(number) for number in record] for record in self._gather(mine)]
        total, every = (sum(column) for column in zip(*records, strict=True))
        before = sum(count for count, _ in records[: self._processes.rank])
        self._shard = Shard(before if self._offset is None else self._offset, total, every)
        if self._shard.offset + samples > total:
            self._closed = True
            raise ValueError(
                f"offset is {self._offset} for {samples} of {total} samples in all processes; expected them to fit."
            )
        return self._shard

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            if self.tangents is not None:
                self.tangents.fail()
            if not self._closed:
                self._processes.fail(_SAID, self._what)
            raise

    def sums(self, tag: float, losses: Tensor, parts: Callable[[], Sequence[Tensor]]) -> list[Tensor] | None:
        assert self._shard is not None
        if self.tangents is not None:
            self.tangents.check(losses)
        found = list(parts())
        mine = torch.tensor([tag, float(losses.double().sum())], dtype=torch.float64, device="cpu")
        records = self._gather(mine)
        self._closed = True
        bad = [rank for rank, record in enumerate(records) if not bool(torch.isfinite(record).all())]
        if bad:
            log.warning("The losses of %s are not finite at %s.", named(self._processes.known(bad)), self._what)
            self._loss = math.nan
            return None
        others = [rank for rank, record in enumerate(records) if record[0] != records[0][0]]
        if others:
            first, *others = self._processes.known([0, *others])
            raise ProcessesDiffer(
                f"the losses of {named(others)} are another program than those of process {first} at {self._what}, or "
                "their samples lie otherwise; expected the same operations on all processes."
            )
        total = records[0][1].clone()
        for record in records[1:]:
            total += record[1]
        self._loss = float(total) / self._shard.total
        return self._processes.sums(found, self._what)

    def _gather(self, numbers: Tensor) -> list[Tensor]:
        try:
            return self._processes.gather(numbers, self._what)
        except LostProcess:
            self._closed = True
            raise

    def mean(self, losses: Tensor) -> Tensor:
        return torch.full((), self._loss, dtype=losses.dtype, device=losses.device)


def _check_count(name: str, value: object, least: int) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ValueError(f"{name} is {value!r}; expected a whole number from {least}.")
