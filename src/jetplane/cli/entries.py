"""The sub-commands that are there, found by entry points, and those of the study that are not.

A command is a module with ``add_parser(commands)`` and ``run(arguments)``, registered in the group
``jetplane.commands`` by the distribution that it comes with. Nothing here imports the study.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from types import ModuleType
from typing import NamedTuple

__all__ = ["GROUP", "Registered", "registered", "sentence"]

GROUP = "jetplane.commands"
_STUDY = ("demo", "train", "tune", "reproduce", "report", "data", "rosenbrock", "bench")
_OWN = {"completion": "completion", "coverage": "coverage", "journal": "show_journal", "replay": "replay_steps"}
_ABSENT = (
    "it belongs to the study in lab/ of the repository, which is not installed; "
    "pip install ./lab in a checkout installs it"
)


class Registered(NamedTuple):
    """The commands that can be run, by name, and why each of the others cannot."""

    commands: dict[str, ModuleType]
    missing: dict[str, str]


def registered() -> Registered:
    """Load all commands."""
    points = _points()
    commands: dict[str, ModuleType] = {}
    missing: dict[str, str] = {}
    for name in dict.fromkeys((*_STUDY, *sorted(points))):
        if name not in points:
            missing[name] = _ABSENT
            continue
        try:
            commands[name] = points[name].load()
        except ImportError as error:  # a package that was moved or half removed must not take the others with it
            missing[name] = f"{points[name].value} cannot be imported: {error}"
    return Registered(commands, missing)


def sentence(name: str, reason: str) -> str:
    """Why a command is missing, as a sentence."""
    return f"the command {name} is missing, because {reason.rstrip('.')}."


def _points() -> dict[str, importlib.metadata.EntryPoint]:
    """Those of the metadata; where a source tree is on the path and was never installed, what is known to be in it."""
    modules = {name: f"jetplane.cli.{module}" for name, module in _OWN.items()}
    if importlib.util.find_spec("jetplane_lab") is not None:
        modules |= {name: f"jetplane_lab.commands.{name}" for name in _STUDY}
    plain = {name: importlib.metadata.EntryPoint(name, module, GROUP) for name, module in modules.items()}
    return plain | {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
