"""What came of a contest: one table in Markdown, and one figure, from the records of its runs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .contest_run import read
from .contestants import CONTESTANTS, MOVING

__all__ = ["draw", "figures", "grouped", "markdown", "records_of"]

_KINDS = {"all": "all weights", "lora": "LoRA"}
_HEAD = (
    "| moves | method | rate | seeds | test accuracy | validation | steps | passes of a step | passes | a step | "
    "peak of a step | parameters and state |\n"
    "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
)
Group = list[dict[str, Any]]


def records_of(folder: Path) -> Group:
    """The tested records of a folder."""
    found = (read(path) for path in sorted(folder.glob("*.json")))
    return [record for record in found if record is not None and record["entry"]["tested"]]


def grouped(records: Group) -> dict[tuple[str, str], Group]:
    """By what moves and method, in the order of the table."""
    groups: dict[tuple[str, str], Group] = defaultdict(list)
    for record in records:
        groups[record["entry"]["moving"], record["entry"]["method"]].append(record)
    order = [(kind, method) for kind in MOVING for method in CONTESTANTS]
    return {key: groups[key] for key in order if key in groups}


def markdown(records: Group) -> str:
    """The table; memory includes parameters, gradients and the optimizer's state."""
    lines = []
    for (kind, _), group in grouped(records).items():
        first = min(group, key=lambda record: record["entry"]["seed"])
        cells = [
            *(_KINDS[kind], first["label"], f"{first['entry']['rate']:g}", str(len(group))),
            *(_spread([100 * record[name] for record in group]) for name in ("test", "validation")),
            *(f"{first['steps']:,}", f"{first['passes_per_step']:.1f}", f"{first['passes']:,.0f}"),
            *(f"{first['step_ms']:.1f} ms", _mib(first["peak"]), _mib(first["held"])),
        ]
        lines.append(f"| {' | '.join(cells)} |\n")
    return _HEAD + "".join(lines)


def _spread(values: Sequence[float]) -> str:
    """The mean, and the sample standard deviation where there are several."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}%"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


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


def draw(records: Group) -> Any:
    """Validation accuracy against forward passes and against time, of the first seed; and test accuracy over memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = grouped(records)
    kinds = [kind for kind in MOVING if any(key[0] == kind for key in groups)]
    with matplotlib.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.2, "svg.hashsalt": "jetplane"}):
        figure, rows = pyplot.subplots(
            len(kinds), 3, figsize=(13, 3.6 * len(kinds)), squeeze=False, layout="constrained"
        )
        for row, kind in zip(rows, kinds, strict=True):
            for (_, method), group in ((key, group) for key, group in groups.items() if key[0] == kind):
                first = min(group, key=lambda record: record["entry"]["seed"])
                colour, line = _STYLE[method]
                heights = [100 * point["validation"] for point in first["curve"]]
                for axes, unit in ((row[0], first["passes_per_step"]), (row[1], first["step_ms"] / 1e3)):
                    places = [unit * point["step"] for point in first["curve"]]
                    axes.plot(places, heights, line, color=colour, label=first["label"], marker=".", markersize=4)
                tests = [100 * record["test"] for record in group]
                row[2].plot([first["peak"] / 2**20] * len(tests), tests, ".", color=colour)
            for axes, name in zip(
                row, ("forward passes of a batch", "seconds, alone", "peak of a step, MiB"), strict=True
            ):
                axes.set(
                    xlabel=name, xscale="log", ylabel="test accuracy, %" if axes is row[2] else "validation accuracy, %"
                )
            row[0].set_title(_KINDS[kind], loc="left")
        figure.legend(*rows[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def figures(records: Group, path: Path) -> None:
    """Write the figure as SVG."""
    from matplotlib import pyplot

    figure = draw(records)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
