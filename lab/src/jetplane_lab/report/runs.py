"""Reading runs: their folders, and the thinned JSON files that are committed in their place.

A record holds the metrics as columns, one value an epoch, and facts that were computed from every epoch before any were
left out, so that a thinned record gives the same tables as the run's folder.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Config

__all__ = ["FORMAT", "LEVELS", "Columns", "Facts", "RunRecord", "read", "thin"]

FORMAT = "jetplane-run-1"
LEVELS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.88, 0.9, 0.91, 0.92, 0.93, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99)
_MOST_EPOCHS = 10**9
WINDOWS = 20  # stretches of a run whose means say whether it got worse again, free of the noise of single epochs

Columns = dict[str, list[float]]  # "epoch" and the metrics; nan where a value is missing or not finite
_WINDOWED = ("train_nll", "validation_nll")


@dataclass(frozen=True)
class Facts:
    """What is computed from all epochs: where validation accuracies were first reached, means of stretches, speed."""

    reached: dict[float, tuple[int, float, float]]  # accuracy -> epoch, forward-equivalents, seconds
    windows: dict[str, list[float]]  # metric -> its mean over each of WINDOWS stretches of equal length
    seconds_per_epoch: float  # the median, so that a first epoch with set-up does not count
    not_taken: int  # steps that left the parameters as they were


@dataclass(frozen=True)
class RunRecord:
    """One run: what was asked for, where it ran, its metrics, and how it ended (None while it goes on)."""

    path: Path
    config: Config
    environment: dict[str, Any]
    columns: Columns
    facts: Facts
    summary: dict[str, Any] | None

    @property
    def epoch(self) -> int:
        """The last epoch there is."""
        return int(self.columns["epoch"][-1])

    @property
    def finished(self) -> bool:
        """Whether it ran all its epochs."""
        return self.summary is not None and self.summary["reason"] == "finished"

    @property
    def diverged(self) -> bool:
        """Whether it was ended because its loss grew."""
        return self.summary is not None and self.summary["reason"] == "diverged"

    @property
    def state(self) -> str:
        """How it stands, in words."""
        if self.diverged and self.summary is not None:
            return str(self.summary["message"])
        return "finished" if self.finished else f"in progress, epoch {self.epoch} of {self.config.epochs}"

    def last(self, metric: str) -> float:
        """The value of the last epoch; nan where there is none."""
        return self.columns[metric][-1] if metric in self.columns else math.nan


def _say(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def read(paths: Iterable[str | Path], warn: Callable[[str], None] = _say) -> list[RunRecord]:
    """The runs under these paths: folders with a config.json, and thinned JSON files.

    What is damaged is named to ``warn`` and left out. Of two copies of one run the longer is kept.
    """
    places = [Path(path) for path in paths]
    found: dict[Config, RunRecord] = {}
    for path in places:
        if not path.exists():
            raise FileNotFoundError(f"there is no {path}; expected a run's folder, a folder of runs or a JSON file.")
        for source in _sources(path):
            try:
                record = _folder(source, warn) if source.is_dir() else _thinned(source)
            except Exception as error:  # whatever is in it: one run must not take the others with it
                warn(f"{source} is left out: {_sentence(error)}")
                continue
            if record is None:
                if source == path:  # was asked for by name
                    warn(f"{source} is left out: it is not a thinned run.")
                continue
            other = found.get(record.config)
            if other is not None and other.path.resolve() != record.path.resolve():
                warn(f"{record.path} and {other.path} are the same run; the longer one is used.")
            if other is None or record.epoch > other.epoch or (record.finished and not other.finished):
                found[record.config] = record
    if not found:
        names = ", ".join(map(str, places)) or "no path"
        raise ValueError(f"no run was found under {names}; expected folders with config.json and metrics.jsonl.")
    return list(found.values())


def _sources(path: Path) -> Iterator[Path]:
    """Run folders and JSON files that may be thinned runs, in the order of their names."""
    if path.is_file():
        yield path
        return
    folders = sorted(config.parent for config in path.rglob("config.json"))
    yield from folders
    inside = set(folders)
    yield from (file for file in sorted(path.rglob("*.json")) if not inside & set(file.parents))


def _sentence(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "its JSON is nested too deeply."
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r}."
    return " ".join(str(error).split()) or type(error).__name__


# -- a folder -----------------------------------------------------------------------------------------------------


def _folder(folder: Path, warn: Callable[[str], None]) -> RunRecord | None:
    config = Config.from_dict(_object(folder / "config.json"))
    metrics = folder / "metrics.jsonl"
    rows = _lines(metrics, warn) if metrics.exists() else []
    if not rows:
        warn(f"{folder} is left out: it has no finished epoch yet.")
        return None
    columns = _columns(rows, metrics)
    untaken = sum(sum(row.get("not_taken", {}).values()) for row in rows)
    environment, summary = _optional(folder / "environment.json", warn), _optional(folder / "summary.json", warn)
    if summary is not None and not {"reason", "message"} <= summary.keys():
        warn(f"{folder / 'summary.json'} says no reason; the run counts as in progress.")
        summary = None
    return RunRecord(folder, config, environment or {}, columns, _facts(columns, untaken), summary)


def _optional(path: Path, warn: Callable[[str], None]) -> dict[str, Any] | None:
    """A file that a run can be reported without."""
    try:
        return _object(path) if path.exists() else None
    except (OSError, ValueError, RecursionError) as error:
        warn(f"{path} is left out: {_sentence(error)}")
        return None


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds a {type(value).__name__}; expected an object.")
    return value


def _lines(path: Path, warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """The rows of a JSONL file; a last line that was cut off is dropped, as it is when a run is being written."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            if number == len(lines):  # no newline after it
                warn(f"the last line of {path} is cut off; the {len(rows)} before it are used.")
                break
            raise ValueError(f"line {number} of {path.name} is damaged: {error}.") from error
        if row is None:
            continue
        if not isinstance(row, dict) or not _is_epoch(row.get("epoch")):
            raise ValueError(f"line {number} of {path.name} is not the metrics of an epoch.")
        if rows and row["epoch"] <= rows[-1]["epoch"]:
            raise ValueError(f"line {number} of {path.name} has epoch {row['epoch']} after {rows[-1]['epoch']}.")
        rows.append(row)
    return rows


def _columns(rows: Sequence[dict[str, Any]], path: Path) -> Columns:
    names = [name for name in rows[0] if all(_is_number(row.get(name)) or row.get(name) is None for row in rows)]
    missing = [name for name in ("epoch", *_WINDOWED, "validation_accuracy", "seconds") if name not in names]
    if missing:
        raise ValueError(f"{path.name} has no {missing[0]}.")
    return {name: [_number(row.get(name)) for row in rows] for name in names}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_epoch(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_EPOCHS


def _number(value: object) -> float:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # a whole number that no float can hold
        return math.nan
    return number if math.isfinite(number) else math.nan


def _facts(columns: Columns, not_taken: int) -> Facts:
    epochs, accuracy, seconds = columns["epoch"], columns["validation_accuracy"], columns["seconds"]
    spent = columns.get("forward_equivalents", [math.nan] * len(epochs))
    reached = {}
    for level in LEVELS:
        first = next((i for i, value in enumerate(accuracy) if value >= level), None)
        if first is not None:
            reached[level] = (int(epochs[first]), spent[first], seconds[first])
    steps = [(t - s) / (b - a) for a, b, s, t in zip(epochs, epochs[1:], seconds, seconds[1:], strict=False) if t >= s]
    per_epoch = statistics.median(steps) if steps else seconds[0] / epochs[0]
    return Facts(reached, {name: _windows(columns[name]) for name in _WINDOWED}, per_epoch, not_taken)


def _windows(values: Sequence[float]) -> list[float]:
    count = min(WINDOWS, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]


# -- thinned ------------------------------------------------------------------------------------------------------


def thin(record: RunRecord, points: int = 300) -> dict[str, Any]:
    """A record as JSON with a bounded number of epochs: the first 20, ``points`` further ones, and the last.

    The further ones lie evenly between equal steps and equal ratios, so that the early fall and the late behaviour are
    both kept. Numbers are rounded to six digits, but for the last epoch's; facts are of all epochs.
    """
    keep = _kept(len(record.columns["epoch"]), points)
    facts = record.facts
    return {
        "format": FORMAT,
        "config": record.config.to_dict(),
        # the command may name folders of the machine it ran on
        "environment": {name: fact for name, fact in record.environment.items() if name != "command"},
        "summary": record.summary,
        "facts": {
            "reached": {f"{level:g}": _plain(values) for level, values in facts.reached.items()},
            "windows": {name: _plain(values) for name, values in facts.windows.items()},
            "seconds_per_epoch": _plain([facts.seconds_per_epoch])[0],
            "not_taken": facts.not_taken,
        },
        "metrics": {
            name: _plain([values[i] for i in keep[:-1]], 6) + _plain(values[-1:])
            for name, values in record.columns.items()
        },
    }


def _kept(count: int, points: int) -> list[int]:
    if count <= 20 + points:
        return list(range(count))
    span = range(points + 1)
    even = (20 + i * (count - 1 - 20) / points for i in span)
    ratio = (20 * ((count - 1) / 20) ** (i / points) for i in span)
    between = {round(math.sqrt(a * b)) for a, b in zip(even, ratio, strict=True)}
    return sorted({*range(20), *between, count - 1})


def _plain(values: Iterable[float], digits: int = 17) -> list[float | int | None]:
    """Numbers for JSON: rounded, whole ones without a point, None for those that are not finite."""

    def one(value: float) -> float | int | None:
        if not math.isfinite(value):
            return None
        short = float(f"{value:.{digits}g}")
        return int(short) if short.is_integer() else short

    return [one(value) for value in values]


def _thinned(path: Path) -> RunRecord | None:
    held = _object(path)
    if held.get("format") != FORMAT:
        return None
    columns = {name: [_number(value) for value in values] for name, values in held["metrics"].items()}
    if len({len(values) for values in columns.values()}) != 1 or not columns["epoch"]:
        raise ValueError("its columns of metrics are empty or of different lengths.")
    if not all(_is_epoch(epoch) for epoch in held["metrics"]["epoch"]):
        raise ValueError("its epochs are not whole numbers from 1.")
    for name, kinds in (("environment", dict), ("summary", dict | None)):
        if not isinstance(held[name], kinds):
            raise ValueError(f"its {name} is a {type(held[name]).__name__}; expected an object.")
    if held["summary"] is not None and not {"reason", "message"} <= held["summary"].keys():
        raise ValueError("its summary says no reason.")
    facts = held["facts"]
    reached = {
        float(level): (int(epoch), _number(spent), _number(seconds))
        for level, (epoch, spent, seconds) in facts["reached"].items()
    }
    windows = {name: [_number(value) for value in values] for name, values in facts["windows"].items()}
    return RunRecord(
        *(path, Config.from_dict(held["config"]), held["environment"], columns),
        facts=Facts(reached, windows, _number(facts["seconds_per_epoch"]), int(facts["not_taken"])),
        summary=held["summary"],
    )
