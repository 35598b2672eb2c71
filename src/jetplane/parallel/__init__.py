"""Many processes that take one step: what they say to each other, and how they stay the same."""

from .quorum import Quorum

__all__ = ["Quorum"]
