"""The adjoints, by subject. Importing a module of this package enters its records into the table."""

from __future__ import annotations

import importlib
from functools import cache

from ...ad import rules

MODULES = ("pointwise", "moves", "look_ups", "linear_maps", "pools", "normalising", "tails", "attending")


@cache
def load() -> None:
    """Enter all records, once; and the engine's rules, for families say what is elementwise."""
    rules.load()
    for name in MODULES:
        importlib.import_module(f"{__name__}.{name}")
