"""Work that a program hands to another thread while a pass runs: tangents are not followed there, so it is refused.

The hooks stay once they are there, and ask one thing outside of passes: to put them in place for each pass would cost a
small step more than its guards otherwise do, and Python forgets how it finds the attributes of a class that is changed.

A mode belongs to its thread. What is refused: starting a thread, submitting to a pool of threads, and putting into a
queue something that may be work, that is a perturbed tensor or a function. What cannot be seen is a
``queue.SimpleQueue``, whose methods are not Python's, and memory that two threads share without one.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import Pool, ThreadPool
from typing import Any

from torch import Tensor

from ...errors import UnsupportedProgram
from .. import _torch
from .locate import call_site

__all__ = ["Handovers"]

_HARMLESS = ("multiprocessing", "concurrent.futures.process", "torch.utils.data", "tqdm")
_POOL = ("apply_async", "_map_async", "imap", "imap_unordered")  # what the other methods of a pool call


class Handovers:
    """The hooks; ``owned(thread)`` says whether a pass runs in that thread, ``tracks`` whether it follows a tensor."""

    def __init__(self, owned: Callable[[int], bool], tracks: Callable[[Tensor], bool]) -> None:
        self._owned = owned
        self._tracks = tracks
        self._hooks: list[tuple[type, str, Any]] = []

    def install(self) -> None:
        """See to it that what hands work over is watched, also where somebody else has replaced it since."""
        if self._hooks and all(owner.__dict__[name] is hook for owner, name, hook in self._hooks):
            return
        self._hooks = [
            self._watched(threading.Thread, "start", self._starts),
            self._watched(ThreadPoolExecutor, "submit", lambda *args: True),
            self._watched(queue.Queue, "put", lambda given, item, *rest: self._is_work(item)),
            *(self._watched(Pool, name, lambda given, *args: isinstance(given, ThreadPool)) for name in _POOL),
        ]

    def _watched(self, owner: type, name: str, loses: Callable[..., bool]) -> tuple[type, str, Any]:
        original = owner.__dict__[name]
        if original in [hook for *_, hook in self._hooks]:
            return owner, name, original

        @functools.wraps(original)
        def checked(given: Any, *args: Any, **kwargs: Any) -> Any:
            if self._owned(threading.get_ident()) and loses(given, *args, *kwargs.values()):
                raise UnsupportedProgram(
                    f"{call_site('the program')} starts a thread or hands work to one by {owner.__name__}.{name}, "
                    "where tangents are not followed; expected it to run in the thread of the pass "
                    "(torch.nn.DataParallel cannot be used)."
                )
            return original(given, *args, **kwargs)

        setattr(owner, name, checked)
        return owner, name, checked

    def _starts(self, thread: threading.Thread) -> bool:
        target = getattr(thread, "_target", None) or type(thread).run
        return not str(getattr(target, "__module__", "")).startswith(_HARMLESS)

    def _is_work(self, item: Any) -> bool:
        leaves = _torch.pytree.tree_leaves(item)
        tensors = [_torch.unwrap_functorch(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        if any(map(self._tracks, tensors)):
            return True
        # a module, too, is a function; numbers, text and records of a log are not
        return any(callable(leaf) for leaf in leaves if not isinstance(leaf, Tensor | type))
