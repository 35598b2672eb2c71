"""The tables of the report in Markdown, for a page that is committed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..markup import plain
from . import tables
from .claims import claims
from .groups import Section, sections
from .runs import RunRecord

__all__ = ["markdown"]


def markdown(records: Sequence[RunRecord]) -> str:
    """The tables and answers of every section."""
    going = tables.status(records)
    lines = [line for section in sections(records) for line in _section(section)]
    return "\n".join([*lines, *(_table(going, "##") if going else [])]).rstrip() + "\n"


def _section(section: Section) -> Iterator[str]:
    yield from (f"## {_cell(section.title)}", "", _cell(section.validation), "")
    if section.caution:
        yield from (_cell(section.caution), "")
    yield from _table(tables.results(section))
    if (beyond := tables.beyond(section)) is not None:
        yield from _table(beyond)
    if section.papers:
        yield from _table(tables.differences(section))
    yield from _table(tables.hyperparameters(section))
    if section.answers:
        yield from ("### What the paper says, and what these runs say", "")
        yield from ("| claim | answer | numbers |", "| --- | --- | --- |")
        yield from (f"| {_cell(c.text)} | **{c.answer}** | {_cell(c.numbers)} |" for c in claims(section))
        yield ""
    yield from _table(tables.cost(section))
    for table in tables.reach(section):
        yield from _table(table)


def _table(table: tables.Table, heading: str = "###") -> Iterator[str]:
    yield from (f"{heading} {_cell(table.title)}", "")
    if table.note:
        yield from (_cell(table.note), "")
    heads = [f"{column.above}: {column.title}" if column.above else column.title for column in table.columns]
    yield "| " + " | ".join(map(_cell, heads)) + " |"
    yield "| " + " | ".join("---:" if column.number else "---" for column in table.columns) + " |"
    for row in table.rows:
        yield "| " + " | ".join(f"**{_cell(c.text)}**" if c.mark == "flag" else _cell(c.text) for c in row) + " |"
    yield ""


def _cell(text: str) -> str:
    """Text on one line that opens no tag and no column: every value of a run passes here."""
    return " ".join(plain(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
