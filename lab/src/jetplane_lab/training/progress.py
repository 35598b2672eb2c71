"""Progress on the standard error: a bar where that is a terminal and tqdm is installed, else a line now and then."""

from __future__ import annotations

import sys
import time
from typing import Any

from .callbacks import Callback
from .metrics import Metrics, Summary
from .trainer import Trainer

__all__ = ["Bar", "Lines", "progress"]


def progress(label: str, position: int = 0) -> Callback:
    """The callback that shows how a run goes; ``position`` is the line of its bar among several."""
    if sys.stderr.isatty():
        try:
            import tqdm  # noqa: F401

            return Bar(label, position)
        except ImportError:
            pass  # lines say the same
    return Lines(label)


def describe(metrics: Metrics) -> str:
    """The metrics that are looked at while a run goes, in a few words.

    Running train values and validation values, and at the end those of a test split apart; NLL and accuracy.
    """
    train = f"train {metrics.train_nll:.4f} {metrics.train_accuracy:.2%}"
    words = f"lr {metrics.lr:.3g}, {train}, validation {metrics.validation_nll:.4f} {metrics.validation_accuracy:.2%}"
    if metrics.test_nll is not None:
        words += f", test {metrics.test_nll:.4f} {metrics.test_accuracy:.2%}"
    missed = sum(metrics.not_taken.values())
    return f"{words}, {missed} of {metrics.steps} steps not taken" if missed else words


class Bar(Callback):
    """A bar over all epochs that moves with every step, with the metrics of the last epoch beside it."""

    def __init__(self, label: str, position: int = 0) -> None:
        self._label, self._position = label, position
        self._bar: Any = None

    def begin(self, run: Trainer) -> None:
        """Draw the bar, filled as far as the run is."""
        from tqdm import tqdm

        shape = "{desc} {percentage:3.0f}%|{bar:16}| {n:.1f}/{total} [{elapsed}<{remaining}] {postfix}"
        self._bar = tqdm(
            desc=self._label,
            total=run.config.epochs,
            initial=run.epoch,
            position=self._position,
            bar_format=shape,
            dynamic_ncols=True,
        )
        self._bar.set_postfix_str("measuring the cost of a step")

    def batch(self, run: Trainer, done: int, total: int) -> None:
        """Move on by a step."""
        self._bar.update(1 / total)

    def epoch(self, run: Trainer, metrics: Metrics) -> None:
        """Show the metrics, and undo the rounding of the steps."""
        self._bar.n = metrics.epoch
        self._bar.set_postfix_str(describe(metrics), refresh=False)

    def end(self, run: Trainer, summary: Summary) -> None:
        """Draw the bar for the last time."""
        self._bar.refresh()
        self._bar.close()


class Lines(Callback):
    """A line of the last epoch every few seconds, and one at the end."""

    def __init__(self, label: str, seconds: float = 5.0) -> None:
        self._label, self._seconds = label, seconds
        self._last = 0.0

    def begin(self, run: Trainer) -> None:
        """Say where the run goes on, and begin to count the seconds."""
        self._last = time.monotonic()
        if run.epoch:
            self._print(f"goes on after epoch {run.epoch} of {run.config.epochs}")

    def batch(self, run: Trainer, done: int, total: int) -> None:
        """In an epoch that takes long, say how far it is."""
        if self._due():
            self._print(f"epoch {run.epoch + 1}/{run.config.epochs}: {done} of {total} steps")

    def epoch(self, run: Trainer, metrics: Metrics) -> None:
        """The metrics, if it is time for a line."""
        if self._due() or metrics.epoch == run.config.epochs:
            self._print(f"epoch {metrics.epoch}/{run.config.epochs}: {describe(metrics)}, {metrics.seconds:.1f} s")

    def _due(self) -> bool:
        if time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return True

    def _print(self, words: str) -> None:
        print(f"{self._label}: {words}", file=sys.stderr, flush=True)
