"""Progress on the standard error: a bar where that is a terminal and tqdm is installed, else lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from .callbacks import Callback
from .metrics import Metrics, Summary
from .trainer import Trainer

__all__ = ["Bar", "Lines", "progress"]

_FETCH_EVERY = 0.5  # seconds between looks at the loss, each of which waits for the device


def progress(label: str, position: int = 0, keep: bool = True) -> Callback:
    """The callback that shows how a run goes.

    ``position`` is the line of its bar among several; without ``keep`` a bar is wiped away at its end.
    """
    if sys.stderr.isatty():
        try:
            import tqdm  # noqa: F401

            return Bar(label, position, keep)
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


def fitting(words: Sequence[str], room: int) -> str:
    """As many of the words, the most important ones first, as there is room for: whole ones, never a part.

    Example:
        >>> fitting(["loss 0.25", "31.0 steps/s", "lr 0.1"], 24)
        'loss 0.25, 31.0 steps/s'
        >>> fitting(["loss 0.25", "31.0 steps/s", "lr 0.1"], 8)
        ''
    """
    line = ""
    for word in words:
        longer = f"{line}, {word}" if line else word
        if len(longer) > room:
            break
        line = longer
    return line


class Bar(Callback):
    """A bar over all epochs that moves with every step; beside it the loss, the speed, the last epoch and the rate.

    What there is no room for on the terminal's line is left out.
    """

    MIN_SECONDS = 0.1  # between drawings
    _SHAPE = "{desc} |{bar:6}| {n:.1f}/{total} {remaining} left{postfix}"

    def __init__(self, label: str, position: int = 0, keep: bool = True, columns: int | None = None) -> None:
        self._label, self._position, self._keep, self._columns = label, position, keep, columns
        self._bar: Any = None
        self._loss = ""
        self._validation: str | None = None
        self._first: int | None = None  # the step with which the run began, or went on
        self._began, self._looked = 0.0, 0.0

    def begin(self, run: Trainer) -> None:
        """Draw the bar, filled as far as the run is."""
        from tqdm import tqdm

        self._bar = tqdm(
            desc=self._label,
            total=run.config.epochs,
            initial=run.epoch,
            position=self._position,
            bar_format=self._SHAPE,
            leave=self._keep,
            mininterval=self.MIN_SECONDS,
            ncols=self._columns,
            dynamic_ncols=self._columns is None,
        )
        self._show(["measuring the cost of a step"], refresh=True)
        self._began = time.monotonic()

    def batch(self, run: Trainer, done: int, total: int) -> None:
        """Move on by a step, and now and then look at the loss."""
        if self._first is None:
            self._first = run.epoch * total
        now = time.monotonic()
        if now - self._looked >= _FETCH_EVERY:
            self._looked = now
            self._loss = f"loss {run.current_loss():.4f}"
        speed = (run.epoch * total + done - self._first) / max(now - self._began, 1e-9)
        words = [self._loss, f"{speed:.3g} steps/s", self._validation, f"lr {run.current_lr():.3g}"]
        self._show([word for word in words if word])
        self._bar.update(run.epoch + done / total - self._bar.n)

    def epoch(self, run: Trainer, metrics: Metrics) -> None:
        """Note the metrics, and undo the rounding of the steps."""
        self._bar.n = metrics.epoch
        self._loss = f"loss {metrics.train_nll:.4f}"
        self._validation = f"valid. {metrics.validation_accuracy:.1%}"
        if metrics.epoch == run.config.epochs:
            self._show([self._loss, self._validation, f"lr {metrics.lr:.3g}"])

    def end(self, run: Trainer, summary: Summary) -> None:
        """Draw the bar for the last time."""
        self._bar.refresh()
        self._bar.close()

    def _show(self, words: list[str], refresh: bool = False) -> None:
        columns = self._columns or self._bar.ncols or 80
        total = self._bar.total
        taken = len(f"{self._label} |123456| {total}.0/{total} 0:00:00 left, ")
        self._bar.set_postfix_str(fitting(words, columns - taken), refresh=refresh)


class Lines(Callback):
    """A line for each epoch, and in an epoch that takes long one every few seconds."""

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
        if time.monotonic() - self._last >= self._seconds:
            place = f"epoch {run.epoch + 1}/{run.config.epochs}: {done} of {total} steps"
            self._print(f"{place}, loss {run.current_loss():.4f}")

    def epoch(self, run: Trainer, metrics: Metrics) -> None:
        """The metrics."""
        self._print(f"epoch {metrics.epoch}/{run.config.epochs}: {describe(metrics)}, {metrics.seconds:.1f} s")

    def _print(self, words: str) -> None:
        self._last = time.monotonic()
        print(f"{self._label}: {words}", file=sys.stderr, flush=True)
