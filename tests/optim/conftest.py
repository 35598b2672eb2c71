"""The launch of processes that tests of other rooms share."""

from group_fixtures import shared, two

__all__ = ["shared", "two"]
