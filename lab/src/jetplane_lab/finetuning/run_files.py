"""The files of a run: its record, JSON, once it is done, and a checkpoint until then."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..data import files
from ..training import checkpoint
from ..training.checkpoint import Damaged, State
from .entry import Entry

__all__ = ["RunFiles", "finite", "read"]

Record = dict[str, Any]
Say = Callable[[str], None]


def finite(value: float) -> float | None:
    """The number, or None where it is not finite: JSON has no word for that."""
    return value if math.isfinite(value) else None


def read(path: Path) -> Record | None:
    """The record of a file, where it is there and whole."""
    try:
        record: Record = json.loads(path.read_text(encoding="utf-8"))
        whole = {"entry", "curve", "environment"} <= record.keys()
    except (OSError, ValueError, AttributeError):
        return None
    return record if whole else None


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """The record and the checkpoint of an entry in a folder. Each is whole or not there, after a kill at any moment."""

    entry: Entry
    folder: Path
    say: Say

    @property
    def path(self) -> Path:
        """Of the record."""
        return self.folder / f"{self.entry.name}.json"

    @property
    def unfinished(self) -> Path:
        """Of the checkpoint."""
        return self.folder / f".{self.entry.name}.safetensors"

    def record(self) -> Record | None:
        """What came of the run, if it is done. A record of other settings is never written over."""
        if not self.path.exists():
            return None
        found = read(self.path)
        if found is None:
            self.say(f"{self.path} is damaged; the run is made again")
            return None
        before, now = found["entry"], json.loads(json.dumps(dataclasses.asdict(self.entry)))
        for name in now["settings"]:
            theirs, ours = before["settings"].get(name), now["settings"][name]
            if theirs != ours:
                raise ValueError(
                    f"{self.path} is a run with {name} {theirs!r}, and this is one with {ours!r}; "
                    "expected another --out."
                )
        return found

    def write(self, record: Record) -> None:
        """Keep a record, and let the checkpoint go."""
        files.write(self.path, (json.dumps(record, allow_nan=False, indent=1) + "\n").encode())
        self.unfinished.unlink(missing_ok=True)

    def save(self, portions: int, model: dict[str, Any], method: dict[str, Any], progress: dict[str, Any]) -> None:
        """Where the run stands after so many portions."""
        state = State(self._digest(), portions, model, method, {}, progress, 0, 0, "")
        files.write(self.unfinished, checkpoint.dump(state))

    def load(self) -> State | None:
        """Where the run stood, if it was stopped; what is damaged, or another run's, is said and left."""
        if not self.unfinished.exists():
            return None
        try:
            state = checkpoint.load(self.unfinished)
        except Damaged as error:
            self.say(f"{error}; the run begins anew")
            return None
        if state.config != self._digest():
            self.say(f"{self.unfinished} is a checkpoint of other settings; the run begins anew")
            return None
        return state

    def _digest(self) -> str:
        fields = json.dumps(dataclasses.asdict(self.entry), sort_keys=True)
        return hashlib.sha256(fields.encode()).hexdigest()
