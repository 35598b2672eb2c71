"""A study in one JSON object, to commit, and as a short table."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import platform
from typing import Any

import torch

import jetplane

from .study import Entry, Study

__all__ = ["markdown", "summary"]


def summary(study: Study) -> dict[str, Any]:
    """All trials of a study, the best, what it cost, and what it ran on. A score that is not finite is null."""
    entries = study.entries
    scored = [entry for entry in entries if entry.state == "complete" and math.isfinite(entry.value or 0.0)]
    best = min(scored, key=lambda entry: (entry.value, entry.number), default=None)
    rows = [_row(entry) for entry in entries]
    states: dict[str, int] = {}
    for entry in entries:
        states[entry.state] = states.get(entry.state, 0) + 1
    return {
        "settings": dataclasses.asdict(study.settings),
        "finished": study.finished(),
        "best": _row(best) if best else None,
        "states": states,
        "cost": {name: _total(rows, name) for name in ("epochs", "seconds", "forward_equivalents")},
        "device": ", ".join(sorted({entry.facts["device"] for entry in entries if "device" in entry.facts})),
        "versions": {
            "jetplane": jetplane.__version__,
            "torch": torch.__version__,
            "optuna": importlib.metadata.version("optuna"),
            "python": platform.python_version(),
        },
        "trials": rows,
    }


def markdown(summary: dict[str, Any], rows: int = 10) -> str:
    """The best trials of a `summary` as a table, under a line that says what was searched."""
    settings, cost = summary["settings"], summary["cost"]
    low, high = settings["lr_bounds"]
    states = ", ".join(f"{count} {state}" for state, count in summary["states"].items())
    passes = f", {cost['forward_equivalents']:,.0f} forward passes over the training set" if cost["epochs"] else ""
    lines = [
        f"`{settings['preset']}`, {settings['sampler']} search: lr from {low:g} to {high:g} (log), batch sizes "
        f"{', '.join(map(str, settings['batch_sizes']))}; {settings['epochs']} epochs, scored by the lowest NLL on "
        f"{settings['hold_out']:,} training examples held out. Trials: {states or 'none'}. "
        f"Cost: {cost['epochs']:,} epochs{passes}.",
        "",
        "| trial | lr | batch size | validation NLL | state | epochs | seconds |",
        "| ---: | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    ordered = sorted(summary["trials"], key=_order)
    for row in ordered[:rows]:
        value = "-" if row["value"] is None else f"{row['value']:.4f}"
        rate = "-" if row["lr"] is None else f"{row['lr']:.4g}"
        seconds = None if row["seconds"] is None else f"{row['seconds']:.1f}"
        cells = (row["number"], rate, row["batch_size"], value, row["state"], row["epochs"], seconds)
        lines.append("| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |")
    if len(ordered) > rows:
        lines += ["", f"Not shown: {len(ordered) - rows} more, worse or not completed."]
    return "\n".join(lines) + "\n"


def _row(entry: Entry) -> dict[str, Any]:
    lr, batch_size = entry.parameters or (None, None)
    finite = entry.value is not None and math.isfinite(entry.value)
    row = {
        "number": entry.number,
        "draw": entry.draw,
        "state": entry.state,
        "lr": lr,
        "batch_size": batch_size,
        "value": entry.value if finite else None,
        "epochs": entry.facts.get("epochs"),
        "seconds": entry.facts.get("seconds"),
        "forward_equivalents": entry.facts.get("forward_equivalents"),
    }
    return row | ({"ended": entry.facts["ended"]} if "ended" in entry.facts else {})


def _order(row: dict[str, Any]) -> tuple[bool, float, int]:
    value = row["value"]
    return row["state"] != "complete", math.inf if value is None else value, row["number"]


def _total(rows: list[dict[str, Any]], name: str) -> Any:
    return round(sum(row[name] or 0 for row in rows), 3)
