"""Rows of a study in a JSONL file that a later run goes on with.

The first line holds the settings; each further line is one finished row with its ``key``. A file with other settings is
begun anew, and a last line that was cut off is dropped, so that an interrupted study goes on where it stood.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["Records", "Row"]

Row = dict[str, Any]


class Records:
    """The rows of one part of a study, by key, each on disk as soon as it is there."""

    def __init__(self, path: Path, settings: Row, fresh: bool = False) -> None:
        self.path = path
        self.settings = json.loads(json.dumps(settings))
        self.rows: dict[str, Row] = {} if fresh else self._read()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_text("".join(map(_line, [{"settings": self.settings}, *self.rows.values()])), encoding="utf-8")
        os.replace(temporary, path)

    def _read(self) -> dict[str, Row]:
        if not self.path.exists():
            return {}
        lines: list[Row] = []
        for text in self.path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:  # cut off in the middle
                break
        if not lines or lines[0].get("settings") != self.settings:
            return {}
        return {row["key"]: row for row in lines[1:]}

    def add(self, row: Row) -> None:
        """Write a row."""
        self.rows[row["key"]] = row
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(row))

    def extend(self, rows: Iterable[Row]) -> None:
        """Write several rows."""
        for row in rows:
            self.add(row)

    def pick(self, keys: list[str]) -> list[Row]:
        """The rows of these keys, in this order."""
        return [self.rows[key] for key in keys]


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n"
