"""Exchanges that a slow process need not be in: over the store of a group, for a collective cannot skip a rank.

    number/rank    what a process has to say at an exchange
    number/all     what the first process makes of those that were there in time
    number/led/n   what it decides later in the same step
    back/rank      the last exchange that a process which was left out has read
    oldest         the first exchange that is still there

The first process waits and decides; the others read. Whoever comes late finds the decision, and goes on from it without
having computed anything: so it catches up.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed

from ..errors import LostProcess
from .processes import Processes, named

__all__ = ["Attendance", "Quorum"]

_KEPT = 1000  # exchanges by which a process may be behind
_GONE = b"gone"
_PAUSE = 0.005  # seconds between two looks who is there, at most


@dataclass(frozen=True)
class Quorum:
    """A group in which a step goes on without processes that are slow, as ``process_group`` of a search in planes.

    At each step the first process waits for all that took part in the step before, at most ``wait`` seconds, and goes
    on when ``least`` are there, itself among them. The mean is then that over their samples, by their weights. Who was
    left out takes the same step from what was decided, without computing anything, until it has caught up; who was left
    out is logged, and written in the record of the step where there is a journal. Where fewer than ``least`` come
    within ``lost`` seconds, or the first process does not, :class:`jetplane.errors.LostProcess` names who is missing.

    Example:
        >>> Quorum(None, least=3, wait=2.0)
        Quorum(group=None, least=3, wait=2.0, lost=300.0)
    """

    group: Any
    least: int
    wait: float
    lost: float = 300.0

    def __post_init__(self) -> None:
        if not isinstance(self.least, int) or isinstance(self.least, bool) or self.least < 1:
            raise ValueError(f"least is {self.least!r}; expected a whole number of processes from 1.")
        for name in ("wait", "lost"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value!r}; expected a positive number of seconds.")


class Attendance:
    """What a process keeps of the exchanges of its group. ``name`` is that of the exchanges, the same in all."""

    def __init__(self, quorum: Quorum, processes: Processes, name: str) -> None:
        self._quorum, self.size, self.rank = quorum, processes.size, processes.rank
        store = processes.group.get_group_store()
        self._store: Any = distributed.PrefixStore(f"jetplane/{name}", store)  # type: ignore[attr-defined]
        self._number = 0  # of the exchange that is next
        self._led = 0  # decisions of the first process since the last one
        self._leds: dict[int, int] = {}  # how many there were, by exchange
        self._there = set(range(1, self.size))  # whom the first process waits for

    # -- an exchange ------------------------------------------------------------------------------------------------

    def decided(self, what: str) -> bytes | None:
        """What came of the next exchange, where that is known before this process has said anything."""
        if self.rank == 0 or not self._store.check([f"{self._number}/all"]):
            return None
        return self._read(what)

    def said(self, mine: bytes, decide: Callable[[dict[int, bytes]], bytes], what: str) -> bytes:
        """Say something, and hear what the first process has made of what was said in time, by rank."""
        if self.rank:
            self._store.set(f"{self._number}/{self.rank}", mine)
            return self._read(what)
        found = decide({0: mine, **self._heard(what)})
        self._store.set(f"{self._number}/all", found)
        self._next()
        self._forget()
        return found

    def led(self, compute: Callable[[], bytes], what: str) -> bytes:
        """What the first process computes."""
        key = f"{self._number - 1}/led/{self._led}"
        self._led += 1
        if self.rank:
            return self._get(key, what)
        found = compute()
        self._store.set(key, found)
        return found

    def gone(self) -> None:
        """Say that this process has failed, so that nobody waits for it."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._number}/{self.rank}", _GONE)

    def back(self) -> None:
        """Say that this process, which was left out, has read what was decided."""
        self._store.set(f"back/{self.rank}", str(self._number - 1))

    # -- the first process ------------------------------------------------------------------------------------------

    def _heard(self, what: str) -> dict[int, bytes]:
        """What the others said in time."""
        self._there |= {rank for rank in range(1, self.size) if rank not in self._there and self._is_back(rank)}
        keys = [f"{self._number}/{rank}" for rank in sorted(self._there)]
        began, pause = time.monotonic(), _PAUSE / 16
        while not self._enough(keys, time.monotonic() - began):
            if time.monotonic() - began > self._quorum.lost:
                found = self._come()
                missing = [rank for rank in range(1, self.size) if rank not in found]
                raise LostProcess(
                    f"{named(missing)} did not come within {self._quorum.lost} s at {what}; expected "
                    f"{self._quorum.least} of {self.size} processes."
                )
            time.sleep(pause)  # the store's own wait has seconds for its unit where it is a file
            pause = min(2 * pause, _PAUSE)
        found = self._come()
        self._there = set(found)
        return found

    def _enough(self, keys: list[str], waited: float) -> bool:
        """Whether the step can go on."""
        there = bool(keys) and self._store.check(keys)
        return (there or not keys or waited > self._quorum.wait) and 1 + len(self._come()) >= self._quorum.least

    def _come(self) -> dict[int, bytes]:
        """What was said so far, but for who failed."""
        keys = {rank: f"{self._number}/{rank}" for rank in range(1, self.size)}
        said = {rank: self._store.get(key) for rank, key in keys.items() if self._store.check([key])}
        return {rank: one for rank, one in said.items() if one != _GONE}

    def _is_back(self, rank: int) -> bool:
        """Whether a process that was left out has caught up."""
        key = f"back/{rank}"
        return bool(self._store.check([key])) and int(self._store.get(key)) >= self._number - 1

    def _forget(self) -> None:
        """Remove the exchange that is too old."""
        old = self._number - 1 - _KEPT
        if old < 0:
            return
        self._store.set("oldest", str(old + 1))
        last = [f"{old}/all", *(f"{old}/{rank}" for rank in range(1, self.size))]
        for key in last:
            self._store.delete_key(key)
        for led in range(self._leds.pop(old)):
            self._store.delete_key(f"{old}/led/{led}")

    # -- the others -------------------------------------------------------------------------------------------------

    def _read(self, what: str) -> bytes:
        found = self._get(f"{self._number}/all", what)
        self._next()
        return found

    def _get(self, key: str, what: str) -> bytes:
        """What the first process has written, or will have."""
        try:
            if not self._store.check([key]):
                if self._store.check(["oldest"]) and int(self._store.get("oldest")) > int(key.partition("/")[0]):
                    raise LostProcess(
                        f"this process ({self.rank}) is more than {_KEPT} exchanges behind at {what}; expected to go "
                        "on from a journal, or a state_dict."
                    )
                self._store.wait([key], timedelta(seconds=self._quorum.lost))
            return bytes(self._store.get(key))
        except RuntimeError as error:
            if isinstance(error, LostProcess):
                raise
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise LostProcess(
                f"process 0 is gone, or did not answer within {self._quorum.lost} s, at {what} ({first}); expected it "
                "to take every step."
            ) from error

    def _next(self) -> None:
        if self.rank == 0:
            self._leds[self._number - 1] = self._led
        self._number += 1
        self._led = 0
