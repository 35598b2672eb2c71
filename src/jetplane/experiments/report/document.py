"""The report as one HTML page that needs no other file."""

from __future__ import annotations

import html
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from . import charts, tables
from .assets import SCRIPT, STYLE
from .claims import Claim, claims
from .groups import METRICS, Section, sections
from .runs import RunRecord

__all__ = ["page"]


def page(
    records: Sequence[RunRecord], title: str = "Training with forward passes", after: Sequence[tables.Table] = ()
) -> str:
    """The page of these runs, with further tables at its end."""
    found = sections(records)
    going = tables.status(records)
    contents = "".join(f"<li><a href='#{_key(one)}'>{html.escape(one.title)}</a></li>" for one in found)
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p class=soft>{html.escape(_environments(records))}</p>",
        f"<nav aria-label=sections><ul>{contents}</ul></nav>",
        *(part for one in found for part in _section(one)),
        *(f"<h2>{html.escape(table.title)}</h2>{_table(table, headed=False)}" for table in after),
        f"<h2>{html.escape(going.title)}</h2>{_table(going, headed=False)}" if going else "",
    ]
    data = json.dumps({_key(one): _data(one) for one in found}, separators=(",", ":"), allow_nan=False)
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        "<meta name=viewport content='width=device-width, initial-scale=1'>\n"
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        # a label could hold "</script>"
        + f"\n<script type='application/json' id=curves>{data.replace('<', chr(92) + 'u003c')}</script>"
        f"\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _key(section: Section) -> str:
    return f"{section.model}-{section.dataset}-{section.hold_out}"


def _section(section: Section) -> list[str]:
    forward = [group for group in section.groups if not group.reverse]
    both = list(section.groups)
    key = _key(section)
    several = any(len(group.counted) > 1 for group in both)
    about = (
        ("Lines are means over seeds, bands one standard deviation. " if several else "Each line is one run. ")
        + ("Dashed lines have a schedule. " if any(group.scheduled for group in both) else "")
        + "Accuracies are drawn on the logarithm of the error. Training values are running averages over an epoch."
    )
    figures = []
    if forward:
        name = {"logistic-regression": " (the paper's figure 3)", "cnn": " (the paper's figure 4)"}.get(
            section.model, ""
        )
        figures.append("<h3>Curves of the forward-only methods</h3>")
        figures.append(charts.figure(key, forward, both, f"Forward mode only{name if section.papers else ''}. {about}"))
    if len(forward) < len(both):
        name = " (the paper's appendix)" if section.papers else ""
        figures.append("<h3>Curves with the reverse-mode methods</h3>")
        figures.append(charts.figure(key, both, both, f"All methods{name}. {about}"))
    return [
        f"<h2 id='{key}'>{html.escape(section.title)}</h2>",
        f"<p>{html.escape(section.validation)}</p>",
        "<h3>What the paper says, and what these runs say</h3>" if section.answers else "",
        f"<p>{html.escape(section.caution)}</p>" if section.caution else "",
        _claims(claims(section)) if section.answers else "",
        _table(tables.results(section)),
        _table(beyond) if (beyond := tables.beyond(section)) is not None else "",
        _table(tables.differences(section)) if section.papers else "",
        _table(tables.hyperparameters(section)),
        *figures,
        _table(tables.cost(section)),
        *map(_table, tables.reach(section)),
    ]


def _environments(records: Sequence[RunRecord]) -> str:
    def most(names: Sequence[str]) -> str:
        return "; ".join(name for name, _ in Counter(names).most_common() if name)

    versions = most([_versions(run.environment) for run in records])
    devices = most([str(run.environment.get("device") or run.config.device) for run in records])
    seeds = len({run.config.seed for run in records})
    return (
        f"{len(records)} runs with {seeds} seed{'s' * (seeds > 1)}, on {devices}{'; ' + versions if versions else ''}."
    )


def _versions(environment: dict[str, Any]) -> str:
    facts = {name: str(environment[name]) for name in ("jetplane", "torch", "python") if environment.get(name)}
    commit = str(environment.get("commit") or "")
    if commit:  # "+" says that files differed from it
        facts["commit"] = commit[:10] + ("+" if commit.endswith("+") else "")
    return ", ".join(f"{name} {fact}" for name, fact in facts.items())


def _claims(found: Sequence[Claim]) -> str:
    kind = {True: "yes", False: "no", None: "soft"}
    rows = "".join(
        f"<tr><td>{html.escape(c.text)}</td><td class={kind[c.holds]}>{c.answer}</td>"
        f"<td>{html.escape(c.numbers)}</td></tr>"
        for c in found
    )
    head = "<thead><tr><th>claim</th><th>answer</th><th>numbers</th></tr></thead>"
    return f"<div class=wide><table class=claims>{head}<tbody>{rows}</tbody></table></div>"


# -- tables -------------------------------------------------------------------------------------------------------


def _table(table: tables.Table, headed: bool = True) -> str:
    note = f"<p class=soft>{html.escape(table.note)}</p>" if table.note else ""
    rows = "".join(
        "<tr>" + "".join(_cell(cell, column) for cell, column in zip(row, table.columns, strict=True)) + "</tr>\n"
        for row in table.rows
    )
    heading = f"<h3>{html.escape(table.title)}</h3>" if headed else ""
    return (
        f"{heading}{note}<div class=wide><table class=sort>"
        f"<thead>{_head(table.columns)}</thead>\n<tbody>\n{rows}</tbody></table></div>"
    )


def _head(columns: Sequence[tables.Column]) -> str:
    def lower(number: int, column: tables.Column, rows: str = "") -> str:
        kind = " class=n" if column.number else ""
        return f"<th scope=col data-column={number}{rows}{kind}>{html.escape(column.title)}</th>"

    numbered = list(enumerate(columns))
    if not any(column.above for column in columns):
        return "<tr>" + "".join(itertools.starmap(lower, numbered)) + "</tr>"
    top = ""
    for above, run in itertools.groupby(numbered, key=lambda item: item[1].above):
        held = list(run)
        top += (
            f"<th scope=colgroup colspan={len(held)}>{html.escape(above)}</th>"
            if above
            else "".join(lower(number, column, " rowspan=2") for number, column in held)
        )
    below = "".join(lower(number, column) for number, column in numbered if column.above)
    return f"<tr>{top}</tr>\n<tr>{below}</tr>"


def _cell(cell: tables.Cell, column: tables.Column) -> str:
    kinds = " ".join(kind for kind in ("n" if column.number else "", cell.mark) if kind)
    value = ""
    if column.number:
        known = cell.value is not None and math.isfinite(cell.value)
        value = f" data-v='{cell.value:.8g}'" if known else " data-v"
    return f"<td{f' class={chr(39)}{kinds}{chr(39)}' if kinds else ''}{value}>{_spread(html.escape(cell.text))}</td>"


def _spread(text: str) -> str:
    """A standard deviation or an interval in small print, so that the values stand out and the table stays narrow."""
    return re.sub(r" (± [\d.e+]+|\[[^\]]*\])$", r" <small>\1</small>", text)


# -- data of the curves, for the read-outs --------------------------------------------------------------------------


def _data(section: Section) -> dict[str, Any]:
    rows = []
    for group in section.groups:
        held = {}
        for metric in METRICS:
            curve = group.curve(metric, charts.POINTS)
            if curve.epochs:
                held[metric] = {"e": curve.epochs, "m": [float(f"{m:.5g}") for m in curve.mean]}
                if not math.isnan(curve.std[0]):
                    held[metric]["s"] = [float(f"{s:.2g}") for s in curve.std]
        rows.append({"label": group.label, "style": charts.style_class(group, section.groups), "curves": held})
    return {"rows": rows}
