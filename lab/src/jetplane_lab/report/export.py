"""The report in files: every table as CSV, every figure as SVG."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..data import files
from ..markup import anchor, plain
from . import charts, tables
from .document import Chapter
from .groups import Section, sections
from .runs import RunRecord

__all__ = ["export"]


def export(records: Sequence[RunRecord], folder: Path, after: Sequence[Chapter] = ()) -> list[Path]:
    """Write them into a folder, and return the files."""
    held = [item for section in sections(records) for item in _section(section)]
    held += [item for chapter in after for item in _chapter(chapter)]
    going = tables.status(records)
    held += [("runs-not-ended.csv", _csv(going))] if going else []
    for name, text in held:
        files.write(folder / name, plain(text).encode())
    return [folder / name for name, _ in held]


def _section(section: Section) -> Iterator[tuple[str, str]]:
    key = anchor(section.model, section.dataset, section.hold_out)
    for table in tables.all_of(section):
        yield f"{key}-{_name(table.title)}.csv", _csv(table)
    for panel in charts.panels(section):
        yield f"{key}-{panel.metric.replace('_', '-')}-by-{panel.axis}.svg", panel.drawing.alone()
    if section.ranked:
        yield f"{key}-results.svg", charts.results(section).alone()
        yield f"{key}-cost-of-steps.svg", charts.cost_of_steps(section).alone()


def _chapter(chapter: Chapter) -> Iterator[tuple[str, str]]:
    key = _name(chapter.title)
    for number, (_, drawing) in enumerate(chapter.figures, 1):
        yield f"{key}-{number}.svg", drawing.alone()
    for table in chapter.tables:
        yield f"{_name(table.title)}.csv", _csv(table)


def _name(title: str) -> str:
    return anchor(*title.lower().split())


def _csv(table: tables.Table) -> str:
    """A table with its numbers as they were computed, and beside them what the page shows where that says more."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    heads = [f"{column.above}: {column.title}" if column.above else column.title for column in table.columns]
    more = [any(_says_more(row[place]) for row in table.rows) for place in range(len(heads))]
    writer.writerow([name for head, twice in zip(heads, more, strict=True) for name in _twice(head, twice)])
    for row in table.rows:
        cells: list[object] = []
        for cell, twice in zip(row, more, strict=True):
            cells += [cell.text if cell.value is None else cell.value, *([cell.text] if twice else [])]
        writer.writerow(cells)
    return buffer.getvalue()


def _twice(head: str, twice: bool) -> list[str]:
    return [head, f"{head} (as shown)"] if twice else [head]


def _says_more(cell: tables.Cell) -> bool:
    """Whether the text has more than the number: a spread, an interval, a mark."""
    return cell.value is not None and any(sign in cell.text for sign in "±[▲(")
