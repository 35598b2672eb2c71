"""The journal of a run: every step as a few numbers in an append-only file, from which any step's parameters follow."""

from .reader import Verified, holds_journal, opened, replay, verify
from .writer import Journal

__all__ = ["Journal", "Verified", "holds_journal", "opened", "replay", "verify"]
