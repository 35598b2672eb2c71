"""The journal of a run: every step as a few numbers in an append-only file, from which any step's parameters follow."""

from .reader import JournalRun, Verified, export, holds_journal, opened, remove, replay, verify
from .shared_journal import SharedJournal
from .step_record import StepRecord
from .writer import Journal, check

__all__ = [
    "Journal",
    "JournalRun",
    "SharedJournal",
    "StepRecord",
    "Verified",
    "check",
    "export",
    "holds_journal",
    "opened",
    "remove",
    "replay",
    "verify",
]
