"""What came of a contest: one table, as text, Markdown and on a page, and one figure, from the records of its runs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..report import Cell, Column, Table
from .contestants import CONTESTANTS, MOVING
from .run_files import Record, read

__all__ = ["as_markdown", "as_text", "figure", "grouped", "records_of", "table"]

_KINDS = {"all": "all weights", "lora": "LoRA"}
_WORDS = ("moves", "method")
_NUMBERS = (
    *("rate", "seeds", "test accuracy", "validation", "steps", "passes of a step", "passes"),
    *("passes to choose the rate", "a step", "peak of a step", "held between steps"),
)
_NOTE = (
    "Accuracies are means over seeds, with the sample standard deviation; the rest is of the first seed. A pass is a "
    "forward pass of a batch, by counted operations. Both columns of memory include parameters, gradients and the "
    "optimizer's state; the peak is of {peak}."
)
Group = list[Record]


def records_of(folder: Path) -> Group:
    """All records of a folder, those by which rates were chosen as well."""
    found = (read(path) for path in sorted(folder.glob("*.json")))
    return [record for record in found if record is not None]


def grouped(records: Iterable[Record]) -> dict[tuple[str, str], Group]:
    """The tested ones by what moves and method, in the order of the table."""
    groups: dict[tuple[str, str], Group] = defaultdict(list)
    for record in records:
        if record["entry"]["tested"]:
            groups[record["entry"]["moving"], record["entry"]["method"]].append(record)
    order = [(kind, method) for kind in MOVING for method in CONTESTANTS]
    return {key: groups[key] for key in order if key in groups}


def chosen_by(records: Iterable[Record], kind: str, method: str) -> float:
    """The passes of the runs by which a method's rate was chosen."""
    tried = CONTESTANTS[method].rates_of or method
    entries = ((record["entry"], record["passes"]) for record in records)
    return sum(
        passes
        for entry, passes in entries
        if not entry["tested"] and (entry["moving"], entry["method"]) == (kind, tried)
    )


def table(records: Group) -> Table:
    """A row for each method."""
    rows = []
    for (kind, method), group in grouped(records).items():
        first = min(group, key=lambda record: record["entry"]["seed"])
        cells = [_KINDS[kind], first["label"], f"{first['entry']['rate']:g}", str(len(group))]
        cells += [_spread([100 * record[name] for record in group]) for name in ("test", "validation")]
        cells += [f"{first['steps']:,}", f"{first['passes_per_step']:.1f}", f"{first['passes']:,.0f}"]
        cells += [f"{chosen_by(records, kind, method):,.0f}", f"{first['step_ms']:.1f} ms"]
        cells += [_mib(first["peak"]), _mib(first["held"])]
        rows.append([Cell(cell) for cell in cells])
    kinds = sorted({str(record["peak_kind"]) for record in records if record["entry"]["tested"]})
    columns = [*(Column(title, number=False) for title in _WORDS), *(Column(title) for title in _NUMBERS)]
    note = f"{_NOTE.format(peak=' and '.join(kinds))} {_measured(records)}"
    return Table("Fine-tuning MiniLM on film reviews", note, columns, rows)


def as_markdown(found: Table) -> str:
    """The table and its note, for a page that is committed."""
    heads = " | ".join(column.title for column in found.columns)
    rules = " | ".join("---:" if column.number else "---" for column in found.columns)
    rows = (" | ".join(cell.text for cell in row) for row in found.rows)
    return "\n".join(f"| {line} |" for line in (heads, rules, *rows)) + f"\n\n{found.note}\n"


def as_text(found: Table) -> str:
    """The table for a terminal, columns under each other, each method in two lines at most."""
    kept = [n for n, column in enumerate(found.columns) if column.title in _SHORT]
    lines = [[_SHORT[found.columns[n].title] for n in kept], *([row[n].text for n in kept] for row in found.rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(kept))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if found.columns[n].number else text.ljust(width)
            for text, width, n in zip(line, widths, kept, strict=True)
        ).rstrip()
        for line in lines
    )


_SHORT = {
    **{"moves": "moves", "method": "method", "rate": "rate", "test accuracy": "test", "passes": "passes"},
    **{"passes to choose the rate": "to choose", "a step": "a step", "peak of a step": "peak"},
}


def _measured(records: Group) -> str:
    """Where, and on what texts."""
    pairs = ((record["environment"], record["entry"]["settings"]) for record in records)
    places = dict.fromkeys(f"{where['device']}, torch {where['torch']}, {_texts(what)}" for where, what in pairs)
    return f"Measured on: {'; '.join(places)}."


def _texts(settings: dict[str, Any]) -> str:
    few = "" if settings["texts"] is None else f" ({settings['texts']} texts of each split)"
    layers = "" if settings["layers"] is None else f", the first {settings['layers']} layers"
    return f"{settings['source']}{few}, batches of {settings['batch']} x {settings['length']}{layers}"


def _spread(values: Sequence[float]) -> str:
    """The mean, and the sample standard deviation where there are several."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}%"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


# -- the figure -------------------------------------------------------------------------------------------------------

# Okabe and Ito's colours, which colour-blind readers can tell apart
_STYLE = {
    "horizon": ("#D55E00", "-"),
    "horizon-default": ("#D55E00", "--"),
    "forward-adamw": ("#E69F00", "-"),
    "gauss-newton": ("#009E73", "-"),
    "fomoh-kd": ("#56B4E9", "-"),
    "mezo": ("#CC79A7", "-"),
    "fzoo": ("#CC79A7", "--"),
    "adamw": ("#0072B2", "-"),
    "adamw-checkpointed": ("#0072B2", ":"),
}
_PANELS = ("forward passes of a batch", "seconds, alone", "peak of a step, MiB")


def figure(records: Group, path: Path) -> None:
    """Validation accuracy against passes and against time, of the first seed; test accuracy over memory. As SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = grouped(records)
    kinds = [kind for kind in MOVING if any(key[0] == kind for key in groups)]
    with matplotlib.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.2, "svg.hashsalt": "jetplane"}):
        drawn, rows = pyplot.subplots(
            len(kinds), 3, figsize=(13, 3.6 * len(kinds)), squeeze=False, layout="constrained"
        )
        for row, kind in zip(rows, kinds, strict=True):
            _draw(row, {method: group for (what, method), group in groups.items() if what == kind})
            row[0].set_title(_KINDS[kind], loc="left")
        drawn.legend(*rows[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, metadata={"Date": None})
    pyplot.close(drawn)


def _draw(row: Any, groups: dict[str, Group]) -> None:
    """The three panels of what moves."""
    for method, group in groups.items():
        first = min(group, key=lambda record: record["entry"]["seed"])
        colour, line = _STYLE[method]
        heights = [100 * point["validation"] for point in first["curve"]]
        for axes, unit in ((row[0], first["passes_per_step"]), (row[1], first["step_ms"] / 1e3)):
            places = [unit * point["step"] for point in first["curve"]]
            axes.plot(places, heights, line, color=colour, label=first["label"], marker=".", markersize=4)
        tests = [100 * record["test"] for record in group]
        row[2].plot([first["peak"] / 2**20] * len(tests), tests, ".", color=colour)
    for axes, name in zip(row, _PANELS, strict=True):
        axes.set(xlabel=name, xscale="log", ylabel="test accuracy, %" if axes is row[2] else "validation accuracy, %")
