"""What one process measures, as plain data that travels as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

__all__ = ["DOES", "PRECISIONS", "Point", "Task"]

# What a process does: "oracle" is the reference on the timed problem, "check" compares a system with the reference in
# float64 on a small batch, "ceilings" is how fast the machine copies and multiplies.
DOES = ("oracle", "check", "ceilings", "time", "memory", "both")
WHATS = ("quadratic", "step")
PRECISIONS = ("float32", "tf32", "float64")


class Point(NamedTuple):
    """What all systems of one comparison have in common."""

    what: str
    model: str
    depth: int  # of an MLP; 0 for models without one
    k: int
    batch: int
    precision: str


@dataclass(frozen=True)
class Task:
    """One measurement of one system.

    Example:
        >>> task = Task("time", "quadratic", "jetplane", "cnn", k=3, batch=256)
        >>> assert Task.of(json.loads(json.dumps(task.plain()))) == task
    """

    does: str
    what: str
    system: str
    model: str
    k: int
    batch: int
    depth: int = 0
    precision: str = "float32"
    device: str = "cpu"
    threads: int = 1
    repeats: int = 7  # samples at least
    seconds: float = 0.5  # of sampling at least
    process: int = 0  # number of the process, where the same thing is measured in several

    def __post_init__(self) -> None:
        for name, allowed in (("does", DOES), ("what", WHATS), ("precision", PRECISIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(allowed)}.")
        for name, least in (("k", 1), ("batch", 1), ("depth", 0), ("threads", 1), ("repeats", 1), ("process", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} is {value!r}; expected a whole number of at least {least}.")
        if self.precision == "tf32" and not self.device.startswith("cuda"):
            raise ValueError(f"the precision is tf32 on {self.device}; expected a CUDA device, which alone has it.")

    @property
    def point(self) -> Point:
        """The comparison that this belongs to."""
        return Point(self.what, self.model, self.depth, self.k, self.batch, self.precision)

    @property
    def key(self) -> str:
        """One line that says all of it, the same for equal tasks."""
        return json.dumps(self.plain(), sort_keys=True, separators=(",", ":"))

    def plain(self) -> dict[str, Any]:
        """As a dictionary for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Task:
        """From a dictionary."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(plain) - known)
        if unknown:
            raise ValueError(f"a task has no {', '.join(unknown)}; expected {', '.join(sorted(known))}.")
        return cls(**plain)

    def but(self, **changes: Any) -> Task:
        """The same task with some fields changed."""
        return replace(self, **changes)
