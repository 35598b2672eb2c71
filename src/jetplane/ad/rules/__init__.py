"""The rules, by subject. Importing a module of this package enters its rules into the table."""

from __future__ import annotations

import importlib
from functools import cache

MODULES = (
    "elementwise", "shapes", "indexing", "reductions", "products", "layers", "norms", "attention", "losses", "linalg",
    "backward",
)  # fmt: skip


@cache
def load() -> None:
    """Enter all rules, once."""
    for name in MODULES:
        importlib.import_module(f"{__name__}.{name}")
