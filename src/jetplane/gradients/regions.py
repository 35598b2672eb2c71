"""What the program does under ``torch.no_grad()`` is constant, as it is to a backward pass.

Every pass runs with autograd off, so the state of autograd tells nothing. Instead ``no_grad`` itself is watched while a
pass runs: a class attribute is replaced, for all threads, and acts for the thread of the pass.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch

__all__ = ["Freezing", "watched"]

_ENTER, _EXIT = torch.no_grad.__enter__, torch.no_grad.__exit__
_LOCK = threading.Lock()
_ACTIVE: list[tuple[Freezing, int]] = []


class Freezing(Protocol):
    """What is told of the regions."""

    frozen: int  # how many of them the program is in


@contextlib.contextmanager
def watched(mode: Freezing) -> Iterator[None]:
    """Inside, ``mode.frozen`` counts the regions of ``no_grad`` that this thread is in."""
    entry = (mode, threading.get_ident())
    with _LOCK:
        if not _ACTIVE:
            torch.no_grad.__enter__, torch.no_grad.__exit__ = _enter, _exit  # type: ignore[method-assign]
        _ACTIVE.append(entry)
    try:
        yield
    finally:
        with _LOCK:
            _ACTIVE.remove(entry)
            if not _ACTIVE:
                torch.no_grad.__enter__, torch.no_grad.__exit__ = _ENTER, _EXIT  # type: ignore[method-assign]


def _enter(self: torch.no_grad) -> None:
    # a checkpoint's no_grad is not the program's: its backward pass differentiates what is inside
    if not sys._getframe(1).f_code.co_filename.endswith("torch/utils/checkpoint.py"):
        self._frozen = [mode for mode, owner in _ACTIVE if owner == threading.get_ident()]  # type: ignore[attr-defined]
        for mode in self._frozen:  # type: ignore[attr-defined]
            mode.frozen += 1
    _ENTER(self)


def _exit(self: torch.no_grad, *exc: Any) -> None:
    for mode in self.__dict__.pop("_frozen", ()):
        mode.frozen -= 1
    _EXIT(self, *exc)
