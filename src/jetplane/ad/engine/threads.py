"""Work that a program hands to another thread while a pass runs: tangents are not followed there, so it is refused.

A mode belongs to its thread. What is refused: starting a thread, submitting to a pool of threads, and putting into a
queue something that may be work, that is a perturbed tensor or a function. What cannot be seen is a
``queue.SimpleQueue``, whose methods are not Python's, and memory that two threads share without one.
"""

from __future__ import annotations

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
        self._replaced: list[tuple[type, str, Any]] = []

    def install(self) -> None:
        """Replace what hands work over."""
        self._replace(threading.Thread, "start", self._starts)
        self._replace(ThreadPoolExecutor, "submit", lambda *args: True)
        self._replace(queue.Queue, "put", lambda given, item, *rest: self._is_work(item))
        for name in _POOL:
            self._replace(Pool, name, lambda given, *args: isinstance(given, ThreadPool))

    def uninstall(self) -> None:
        """Put everything back."""
        while self._replaced:
            owner, name, original = self._replaced.pop()
            setattr(owner, name, original)

    def _replace(self, owner: type, name: str, loses: Callable[..., bool]) -> None:
        original = owner.__dict__[name]
        self._replaced.append((owner, name, original))

        # not functools.wraps, which a step of few operations would notice: it is there for the length of a pass
        def checked(given: Any, *args: Any, **kwargs: Any) -> Any:
            if self._owned(threading.get_ident()) and loses(given, *args, *kwargs.values()):
                raise UnsupportedProgram(
                    f"{call_site('the program')} starts a thread or hands work to one by {owner.__name__}.{name}, "
                    "where tangents are not followed; expected it to run in the thread of the pass "
                    "(torch.nn.DataParallel cannot be used)."
                )
            return original(given, *args, **kwargs)

        setattr(owner, name, checked)

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
