"""The launches of processes that tests share."""

from group_fixtures import four, shared, two

__all__ = ["four", "shared", "two"]
