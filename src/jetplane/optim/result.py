"""What a minimisation found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

__all__ = ["Ending", "Result"]


class Ending(IntEnum):
    """Why a minimisation ended: the numbers of ``Result.status``."""

    RUNNING = -1
    CONVERGED = 0
    ITERATIONS = 1
    EVALUATIONS = 2
    STALLED = 3
    ELSEWHERE = 4  # the steps came to rest, and not at the best point
    CALLBACK = 99  # as in scipy


@dataclass(frozen=True, eq=False)
class Result(Mapping[str, Any]):
    """The outcome of :func:`jetplane.minimize`, with the names of scipy's OptimizeResult, as attributes and as items.

    Example:
        >>> import jetplane as jp
        >>> result = jp.minimize(lambda x: (x - 3) ** 2, 0.0)
        >>> result.x, result["x"], result.jac
        (tensor(3., dtype=torch.float64), tensor(3., dtype=torch.float64), tensor(0., dtype=torch.float64))
        >>> sorted(result)
        ['fun', 'history', 'jac', 'message', 'nfev', 'nit', 'status', 'success', 'x']
    """

    x: Any  # the structure of x0, arrays where arrays were given
    fun: float  # at x
    jac: Any = field(repr=False)  # the gradient at x, with its structure; None where it was not computed
    success: bool  # whether a tolerance was met
    status: int  # an Ending
    message: str
    nit: int  # steps
    nfev: int  # calls of fun
    history: list[float] = field(repr=False)  # fun at x0 and after each step

    def __getitem__(self, name: str) -> Any:
        if name not in self._names():
            raise KeyError(f"{name!r}; expected one of {', '.join(self._names())}.")
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> list[str]:
        return [one.name for one in fields(self)]
