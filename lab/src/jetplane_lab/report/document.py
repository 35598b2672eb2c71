"""The report as one HTML page that needs no other file."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..inlined import Drawn
from ..markup import Markup, anchor, fill, join
from . import charts, tables
from .assets import SCRIPT, STYLE
from .claims import Claim, claims
from .groups import METRICS, Section, sections
from .lead import sentence, settings
from .runs import RunRecord

__all__ = ["Chapter", "page"]


class Chapter(NamedTuple):
    """A part of the page that is not made of runs: what it says, its figures with their captions, and its tables."""

    title: str
    text: str
    figures: Sequence[tuple[str, Drawn]] = ()
    tables: Sequence[tables.Table] = ()


def page(
    records: Sequence[RunRecord], title: str = "Training with forward passes", after: Sequence[Chapter] = ()
) -> str:
    """The page of these runs, with further chapters at its end."""
    found = sections(records)
    going = tables.status(records)
    titles = [(_key(one), one.title) for one in found] + [(anchor(one.title), one.title) for one in after]
    contents = join(fill("<li><a href='#{key}'>{title}</a></li>", key=key, title=title) for key, title in titles)
    parts = [
        fill("<h1>{title}</h1>", title=title),
        *(_lead(one, several=len(found) > 1) for one in found),
        *(_results(found[0]) if found else ()),
        fill("<p class=soft>{about}</p>", about=_environments(records)) if records else "",
        fill("<nav aria-label=sections><ul>{contents}</ul></nav>", contents=contents) if len(titles) > 1 else "",
        *(part for number, one in enumerate(found) for part in _section(one, first=number == 0)),
        *(part for one in after for part in _chapter(one)),
        _headed(going) if going else "",
    ]
    data = json.dumps({_key(one): _data(one) for one in found}, separators=(",", ":"), allow_nan=False)
    return fill(
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        "<meta name=viewport content='width=device-width, initial-scale=1'>\n"
        "<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}"
        "\n<script type='application/json' id=curves>{data}</script>"
        "\n<script>{script}</script>\n</body>\n</html>\n",
        title=title,
        style=Markup(STYLE),
        body=join((part for part in parts if part), "\n"),
        data=Markup(data.replace("<", "\\u003c")),  # a label could hold "</script>"
        script=Markup(SCRIPT),
    )


def _headed(table: tables.Table) -> Markup:
    return fill("<h2>{title}</h2>{table}", title=table.title, table=_table(table, headed=False))


def _key(section: Section) -> str:
    return anchor(section.model, section.dataset, section.hold_out)


def _lead(section: Section, several: bool) -> Markup | str:
    """The result of a section in a sentence."""
    said = sentence(section)
    if not said:
        return ""
    link = fill("<a href='#{key}'>{title}</a>: ", key=_key(section), title=section.title) if several else ""
    return fill("<p class=lead>{link}{said}</p>", link=link, said=said)


def _results(section: Section) -> list[Markup | str]:
    """The figure of the result."""
    if not section.ranked:
        return []
    drawings = [charts.results(section), charts.cost_of_steps(section)]
    base = section.baseline
    line = f" The dashed line is the best row of backprop: {base.label} ({settings(base)})." if base else ""
    caption = f"{section.title}. Circles use forward passes alone, squares a backward pass.{line} {section.validation}"
    return [_drawings(drawings, caption)]


def _drawings(drawings: Sequence[Drawn], caption: str) -> Markup:
    shown = join(drawing.inline("class=panel aria-label='{caption}'", caption=caption) for drawing in drawings)
    return fill(
        "<figure><div class=panels>{shown}</div><figcaption>{caption}</figcaption></figure>",
        shown=shown,
        caption=caption,
    )


def _captioned(caption: str, drawing: Drawn) -> Markup:
    shown = drawing.inline("class=panel aria-label='{caption}'", caption=caption)
    return fill("<figure>{shown}<figcaption>{caption}</figcaption></figure>", **{"shown": shown, "caption": caption})


def _chapter(chapter: Chapter) -> list[Markup | str]:
    return [
        fill("<h2 id='{key}'>{title}</h2>", key=anchor(chapter.title), title=chapter.title),
        fill("<p>{text}</p>", text=chapter.text) if chapter.text else "",
        fill("<div class=panels>{figures}</div>", figures=join(_captioned(*one) for one in chapter.figures)),
        *(_table(table, headed=len(chapter.tables) > 1) for table in chapter.tables),
    ]


def _section(section: Section, first: bool) -> list[Markup | str]:
    key = _key(section)
    several = any(len(group.counted) > 1 for group in section.groups)
    about = (
        ("Lines are means over seeds, bands one standard deviation. " if several else "Each line is one run. ")
        + ("Dashed lines have a schedule. " if any(group.scheduled for group in section.groups) else "")
        + "A forward pass over the training data is the unit of cost. Training values are running averages over an "
        "epoch. A name above the panels hides its line."
    )
    paper = {"logistic-regression": "The paper's figure 3. ", "cnn": "The paper's figure 4. "}.get(section.model, "")
    curves = charts.panels(section)
    return [
        fill("<h2 id='{key}'>{title}</h2>", key=key, title=section.title),
        *([] if first else _results(section)),
        Markup("<h3>Curves</h3>"),
        charts.figure(key, section, curves, (paper if section.papers else "") + about)
        if curves
        else Markup("<p class=soft>No curve was recorded.</p>"),
        _table(tables.results(section)),
        _table(beyond) if (beyond := tables.beyond(section)) is not None else "",
        Markup("<h3>What the paper says, and what these runs say</h3>") if section.answers else "",
        fill("<p>{text}</p>", text=section.caution) if section.caution and section.answers else "",
        _claims(claims(section)) if section.answers else "",
        _table(tables.differences(section)) if section.papers else "",
        _table(tables.cost(section)),
        *map(_table, tables.reach(section)),
        _table(tables.hyperparameters(section)),
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


def _claims(found: Sequence[Claim]) -> Markup:
    kind = {True: "yes", False: "no", None: "soft"}
    row = "<tr><td>{text}</td><td class={kind}>{answer}</td><td>{numbers}</td></tr>"
    rows = (fill(row, text=c.text, kind=kind[c.holds], answer=c.answer, numbers=c.numbers) for c in found)
    head = "<thead><tr><th>claim</th><th>answer</th><th>numbers</th></tr></thead>"
    return fill(f"<div class=wide><table class=claims>{head}<tbody>{{rows}}</tbody></table></div>", rows=join(rows))


# -- tables -------------------------------------------------------------------------------------------------------


def _table(table: tables.Table, headed: bool = True) -> Markup:
    rows = join(
        fill("<tr>{cells}</tr>\n", cells=join(itertools.starmap(_cell, zip(row, table.columns, strict=True))))
        for row in table.rows
    )
    return fill(
        "{heading}{note}<div class=wide><table class=sort><thead>{head}</thead>\n<tbody>\n{rows}</tbody></table></div>",
        heading=fill("<h3>{title}</h3>", title=table.title) if headed else "",
        note=fill("<p class=soft>{note}</p>", note=table.note) if table.note else "",
        head=_head(table.columns),
        rows=rows,
    )


def _head(columns: Sequence[tables.Column]) -> Markup:
    def lower(number: int, column: tables.Column, rows: str = "") -> Markup:
        kind = " class=n" if column.number else ""
        return fill(f"<th scope=col data-column={number}{rows}{kind}>{{title}}</th>", title=column.title)

    numbered = list(enumerate(columns))
    if not any(column.above for column in columns):
        return fill("<tr>{cells}</tr>", cells=join(itertools.starmap(lower, numbered)))
    top = []
    for above, run in itertools.groupby(numbered, key=lambda item: item[1].above):
        held = list(run)
        if above:
            top.append(fill(f"<th scope=colgroup colspan={len(held)}>{{above}}</th>", above=above))
        else:
            top += [lower(number, column, " rowspan=2") for number, column in held]
    below = join(lower(number, column) for number, column in numbered if column.above)
    return fill("<tr>{top}</tr>\n<tr>{below}</tr>", top=join(top), below=below)


def _cell(cell: tables.Cell, column: tables.Column) -> Markup:
    kinds = " ".join(kind for kind in ("n" if column.number else "", cell.mark) if kind)
    value = ""
    if column.number:
        known = cell.value is not None and math.isfinite(cell.value)
        value = f" data-v='{cell.value:.8g}'" if known else " data-v"
    named = fill(" class='{kinds}'", kinds=kinds) if kinds else ""
    label = f"{column.above}, {column.title}" if column.above else column.title
    return fill(
        "<td{named}{value} data-label='{label}'>{text}</td>",
        **{"named": named, "value": Markup(value), "label": label, "text": _spread(cell.text)},
    )


def _spread(text: str) -> Markup:
    """A standard deviation or an interval in small print, so that the values stand out and the table stays narrow."""
    found = re.fullmatch(r"(.*) (± [\d.e+]+|\[[^\]]*\])", text, re.DOTALL)
    return fill("{text} <small>{small}</small>", text=found[1], small=found[2]) if found else join([text])


# -- data of the curves, for the read-outs --------------------------------------------------------------------------


def _data(section: Section) -> dict[str, Any]:
    rows = []
    for group in section.groups:
        held: dict[str, Any] = {}
        for metric in METRICS:
            curve = group.curve(metric, charts.POINTS)
            if not curve.epochs:
                continue
            scale = 100 if metric.endswith("accuracy") else 1
            held[metric] = {"m": [float(f"{charts.value(metric, mean):.4g}") for mean in curve.mean]}
            if not math.isnan(curve.std[0]):
                held[metric]["s"] = [float(f"{scale * std:.2g}") for std in curve.std]
            at = {axis: [float(f"{place:.5g}") for place in places] for axis, places in curve.along.items()}
            if at == held.setdefault("at", at):
                continue
            held[metric]["at"] = at
        rows.append({"label": group.label, "style": charts.style_class(group, section.groups), "curves": held})
    return {"rows": rows}
