"""What looks on while a run trains: progress bars and trackers are callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .metrics import Metrics, Summary

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["Callback"]


class Callback:
    """Is told how a run goes; each method may be overridden and does nothing by itself."""

    def begin(self, run: Trainer) -> None:
        """Training begins, or goes on after ``run.epoch`` epochs."""

    def batch(self, run: Trainer, done: int, total: int) -> None:
        """So many of the steps of an epoch are taken."""

    def epoch(self, run: Trainer, metrics: Metrics) -> None:
        """An epoch is done and its metrics are on disk."""

    def end(self, run: Trainer, summary: Summary) -> None:
        """Training ended; for an interrupted run too."""
