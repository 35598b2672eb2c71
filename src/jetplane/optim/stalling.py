"""What to say when steps in a row could not move the parameters."""

from __future__ import annotations

from ..solvers import Status

__all__ = ["explain"]

_REMEDIES = {
    Status.NONFINITE: "Look whether the loss is finite at the parameters as they are; if it is, take a smaller lr.",
    Status.SINGULAR: "Take fewer directions, or a solver that needs no inverse, such as SaddleFree() or Damped().",
    Status.REJECTED: "The loss is as low as its rounding shows, or steps are too long: take a smaller lr, or "
    "Acceptance(backtracks=...).",
}


def explain(count: int, status: Status) -> str:
    """What happened, and what can be done about it.

    Example:
        >>> explain(3, Status.SINGULAR)[:76]
        '3 steps in a row did not move the parameters, the last with status SINGULAR:'
    """
    said = f"{count} steps in a row did not move the parameters, the last with status {status.name}: {status.value}."
    return f"{said} {_REMEDIES[status]}"
