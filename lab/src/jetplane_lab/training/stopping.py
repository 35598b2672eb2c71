"""A wish to stop: signals that end a run after its epoch, with a checkpoint, and not in the middle."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

__all__ = ["EXIT", "Ended", "Stop", "ending_signals", "stop_signals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed, a connection was lost
EXIT = {number.name: 128 + number for number in _SIGNALS}  # as a shell reports them


class Ended(KeyboardInterrupt):
    """A signal other than Ctrl-C asks the process to end; its argument is the signal's name."""


@dataclass
class Stop:
    """Whether, and by what, a run was asked to stop."""

    by: str | None = None


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """A :class:`Stop` that SIGTERM, SIGHUP and the first SIGINT (Ctrl-C) set; a second SIGINT interrupts at once.

    What is ignored stays ignored: nohup does so with SIGHUP. Outside the main thread, where Python allows no handlers,
    nothing sets it.
    """
    stop = Stop()

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and stop.by is not None:
            raise KeyboardInterrupt
        stop.by = signal.Signals(number).name

    with _handled(_SIGNALS, ask):
        yield stop


@contextlib.contextmanager
def ending_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise :class:`Ended`, so that what is under way is given back as at Ctrl-C."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended(signal.Signals(number).name)

    with _handled(_SIGNALS[1:], end):
        yield


@contextlib.contextmanager
def _handled(numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
