"""All systems that compute the plane, by name."""

from __future__ import annotations

import difflib

from . import authors, functional, jax_peer, ours, taylor
from .system import Prepared, Setting, System

__all__ = ["SYSTEMS", "Prepared", "Setting", "System", "find"]

SYSTEMS: dict[str, System] = {
    system.name: system for module in (ours, functional, jax_peer, taylor, authors) for system in module.SYSTEMS
}


def find(name: str) -> System:
    """The system of a name.

    Example:
        >>> find("jetplane").kind
        'ours'
    """
    if name not in SYSTEMS:
        near = difflib.get_close_matches(name, SYSTEMS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"there is no system {name!r}{hint}; expected one of {', '.join(SYSTEMS)}.")
    return SYSTEMS[name]
