"""What is measured: the metrics of an epoch, a line of ``metrics.jsonl`` each, and the summary of a run."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["Metrics", "Summary"]


@dataclass(frozen=True)
class Metrics:
    """One epoch. In the file a null stands for what was not measured, and for a number that is not finite.

    "Running" values are averages over the batches, each before its step, while the parameters move: the paper's.
    Slope, curvature and step length are means over steps and directions; None for torch's optimizers.
    """

    epoch: int  # from 1
    lr: float  # of this epoch
    train_nll: float  # running
    train_accuracy: float
    train_nll_after: float | None  # of the training split after the epoch
    train_accuracy_after: float | None
    validation_nll: float  # after the epoch
    validation_accuracy: float
    slope: float | None  # |v . g|
    curvature: float | None  # v^T H v
    negative_curvature: float | None  # share of directions along which the curvature is negative
    step_length: float | None  # lr |c|, the length of the step in the coordinates of the plane
    steps: int
    not_taken: dict[str, int]  # steps that did not move the parameters, by the name of their status
    forward_equivalents: float  # so far, in forward passes over the training split
    seconds: float  # of training, so far
    evaluation_seconds: float  # so far
    peak_memory: int  # bytes above what was held before training, so far
    together: int = 1  # runs that shared the device, and so the seconds and the memory
    test_nll: float | None = None  # of the test split, once: after the last epoch of a run with samples held out
    test_accuracy: float | None = None

    def to_json(self) -> str:
        """One line, without its end."""
        return json.dumps(_finite(dataclasses.asdict(self)), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The metrics of a line; what is always measured and stands there as null was not finite."""
        return cls.from_dict(json.loads(line))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """The metrics of the object of a line."""
        always = {field.name for field in dataclasses.fields(cls) if field.type == "float"}
        missing: dict[str, Any] = {name: math.nan for name in always if fields.get(name, 0.0) is None}
        return cls(**{**fields, **missing})


@dataclass(frozen=True)
class Summary:
    """The end of a run."""

    reason: str  # "finished", "diverged" or "interrupted"
    message: str  # the same in a sentence
    epochs: int  # that were trained
    final: Metrics | None  # of the last epoch
    best_validation_nll: float | None
    best_validation_accuracy: float | None
    parameters: int
    forward_equivalents_per_step: float  # of a full batch
    seconds: float
    evaluation_seconds: float
    peak_memory: int
    peak_memory_kind: str  # "cuda allocated" or "resident set"

    def to_json(self) -> str:
        """A JSON object."""
        return json.dumps(_finite(dataclasses.asdict(self)), allow_nan=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The summary from what `to_json` gave."""
        fields = json.loads(text)
        final = fields.pop("final")
        return cls(final=None if final is None else Metrics.from_dict(final), **fields)


def _finite(value: Any) -> Any:
    """``value`` with None for each number that is not finite: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return value
