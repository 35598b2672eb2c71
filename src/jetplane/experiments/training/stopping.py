"""A wish to stop: signals that end a run after its epoch, with a checkpoint, and not in the middle."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

__all__ = ["Stop", "stop_signals"]


@dataclass
class Stop:
    """Whether, and by what, a run was asked to stop."""

    by: str | None = None


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """A :class:`Stop` that SIGTERM and the first SIGINT (Ctrl-C) set; a second SIGINT interrupts at once.

    Outside the main thread, where Python allows no handlers, nothing sets it.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and stop.by is not None:
            raise KeyboardInterrupt
        stop.by = signal.Signals(number).name

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
