"""An operation that has run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...ad.algebra.registry import argument_names

__all__ = ["Done"]


@dataclass(frozen=True, eq=False)
class Done:
    """An operation that has run. ``func`` is functional: arguments are as they were before a write."""

    func: Any
    args: Any
    kwargs: Any
    out: Any

    @property
    def result(self) -> Tensor:
        """The first output, which is the one that varies."""
        return self.out[0] if isinstance(self.out, tuple | list) else self.out

    def bound(self) -> dict[str, Any]:
        """The arguments by name, defaults filled in."""
        given = dict(zip(argument_names(self.func), self.args, strict=False)) | self.kwargs
        return {a.name: given.get(a.name, a.default_value) for a in self.func._schema.arguments}
