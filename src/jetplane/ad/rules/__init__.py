"""The rules, by subject. Importing a module of this package enters its rules into the table."""

from __future__ import annotations

import importlib
from functools import cache

MODULES = (
    *(
        "elementwise",
        "special",
        "gamma_function",
        "activations",
        "shapes",
        "indexing",
        "reductions",
        "products",
        "pooled",
    ),
    *("factorisations", "spectra", "determinants"),
    *("layers", "norms", "attention", "losses", "backward"),
    *("control_flow", "well_known_functions", "torchvision_operations"),
    *("complex_numbers", "collectives", "sync_batch_norm", "mark"),
)


@cache
def load() -> None:
    """Enter all rules, once."""
    for name in MODULES:
        importlib.import_module(f"{__name__}.{name}")
