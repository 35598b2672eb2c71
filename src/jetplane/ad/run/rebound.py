"""Buffers that modules are given anew while a program runs: ``self.mean = 0.9 * self.mean + ...``, and no write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook

__all__ = ["Rebound"]

Place = tuple[nn.Module, str]
_NONE = object()  # what was no buffer yet


class Rebound:
    """The buffers that were assigned, with what they were before the first time.

    Example:
        >>> import torch
        >>> norm, rebound = nn.BatchNorm1d(1), Rebound()
        >>> with rebound.watched():
        ...     norm.running_mean = torch.ones(1)
        >>> rebound.restore()
        >>> norm.running_mean
        tensor([0.])
    """

    def __init__(self) -> None:
        self._before: dict[Place, Any] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, assignments are seen."""
        handle = register_module_buffer_registration_hook(self._note)
        try:
            yield
        finally:
            handle.remove()

    def restore(self) -> None:
        """Give each module the buffers that it had."""
        _assign(self._before)

    def contents(self) -> dict[Place, Any]:
        """The buffers that were assigned, as they are now."""
        return {(module, name): getattr(module, name, _NONE) for module, name in self._before}

    def assign(self, contents: dict[Place, Any]) -> None:
        """Give modules the buffers that :meth:`contents` has found."""
        _assign(contents)

    def _note(self, module: nn.Module, name: str, buffer: Tensor) -> None:
        self._before.setdefault((module, name), getattr(module, name, _NONE))


def _assign(buffers: dict[Place, Any]) -> None:
    for (module, name), buffer in buffers.items():
        if buffer is not _NONE:
            setattr(module, name, buffer)
        elif hasattr(module, name):
            delattr(module, name)
