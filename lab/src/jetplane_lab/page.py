"""The study as one HTML page that needs no other file: figures inlined, light and dark, and the numbers as text."""

from __future__ import annotations

import base64
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .functions import TestFunction
from .markup import Markup, fill, join
from .records import Row
from .rosenbrock import ADAM_LR, LR, Claim, contenders, medians

__all__ = ["Study", "page"]


class Study(NamedTuple):
    """All rows of a finished study, and the steps and dimensions they were made with."""

    entry: TestFunction
    single: Sequence[Row]
    histograms: Sequence[Row]
    comparison: Sequence[Row]
    comparison_steps: int
    planes: Sequence[Row]
    planes_steps: int
    planes_dim: int
    descending: Sequence[Row]
    claims: Sequence[Claim]
    versions: dict[str, str]


_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --paper: #ffffff; --rule: #d1d9e0; --tint: #f4f6f8;
  --yes: #00704f; --no: #a33c00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --soft: #a0a8b0; --paper: #16181d; --rule: #3a4048;
  --tint: #1f2329; --yes: #3fd0a4; --no: #ffa166; } }
body { background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; margin: 0 auto;
  max-width: 62rem; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.25rem; margin: 2.4rem 0 .5rem; }
p { max-width: 46rem; } .soft { color: var(--soft); }
figure { margin: 1rem 0; } figure img { max-width: 100%; height: auto; } figcaption { color: var(--soft);
  font-size: .92rem; max-width: 46rem; }
.lead { font-size: 1.12rem; } .wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .94rem; }
th, td { border-bottom: 1px solid var(--rule); padding: .3rem .7rem; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.yes { color: var(--yes); font-weight: 600; } .no { color: var(--no); font-weight: 600; }
@media (max-width: 45rem) {
  tr:first-child { display: none; } table, tbody, tr { display: block; }
  tr { border-bottom: 2px solid var(--rule); padding: .4rem 0; }
  td { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: .1rem 0; }
  td.n { white-space: normal; } td::before { content: attr(data-label); color: var(--soft); }
}
"""


def page(study: Study, folder: Path) -> str:
    """The page; the figures are read from the folder, as the names of their parts with .png and -dark.png."""
    name = "-".join(word.capitalize() for word in study.entry.name.split("-"))
    dim = study.entry.dim(2)
    seeds = len({row["seed"] for row in study.comparison})
    samples = len(next(row["steps"] for row in study.single if row["key"] == "FGD"))
    draws = 1 + max(row["draw"] for row in study.planes)
    held = sum(claim.holds for claim in study.claims)
    parts = [
        fill("<h1>The {name} function, forward only</h1>", name=name),
        Markup(
            "<p class='soft'>Second-order steps from forward passes: FoMoH searches a line, FoMoH-KD a plane of K "
            "random directions, with the exact slope and curvature there. All runs are float64; directions and "
            "starts are functions of the seed.</p>"
        ),
        fill("<p class='lead'>{text}</p>", text=_forward_only(study)),
        _figure(
            *(folder, "comparison"),
            f"{seeds} common starts, {study.comparison_steps} steps; the thick line is the median, the thin ones are "
            f"the runs. FGD at lr = {LR:g} and twice that, SGD at {2 * LR:g}, Adam at {ADAM_LR:g}; the others at 1. "
            "Values below 1e-16 are drawn there; a median ends where more than half of the runs have diverged.",
        ),
        Markup("<h2>What the paper says, and what these data say</h2>"),
        Markup(
            f"<p>{held} of {len(study.claims)} statements hold here. A value is the median over {seeds} common starts; "
            "a run that diverged counts as infinite.</p>"
        ),
        _table(
            ["statement", "", "numbers"],
            [[c.text, _verdict(c.holds), c.numbers] for c in study.claims],
        ),
        Markup(f"<h2>One step in {dim}D</h2>"),
        _figure(
            *(folder, "single-step"),
            f"{samples:,} steps of each random method from one point with a positive definite Hessian; lines lead to "
            f"the mean of each. FGD (lr {LR:g}) follows the gradient on average and depends on its rate; FoMoH's "
            "samples lie on the ellipse that the Hessian defines. FoMoH-2D lies on Newton's step, as two independent "
            "directions span the whole plane.",
        ),
        _figure(
            *(folder, "histograms"),
            "The same steps along each coordinate, along the negative gradient and along Newton's step. The count is "
            "logarithmic; dashed lines are means. The bins hold the middle 99% of every method.",
        ),
        _table(["axis", "method", "mean", "standard deviation", "Newton"], _moments(study), numbers=(2, 3, 4)),
        Markup(f"<h2>All methods in {dim}D</h2>"),
        _runs(study, study.comparison, study.comparison_steps, dim),
        Markup(f"<h2>Planes of K directions in {study.planes_dim}D</h2>"),
        _figure(
            *(folder, "planes"),
            f"{seeds} common starts, {study.planes_steps} steps, {draws} independent draws of the directions from each "
            "start (one for K = D and Newton, which do not depend on it); thin lines are the runs of the "
            "first draw. A plane with an indefinite curvature can send the paper's step uphill, which is the noise in "
            "the single runs, and is commonest where K is a little less than D. A run can also end in a local minimum; "
            "the table counts those.",
        ),
        _thrown(study.planes),
        _runs(study, study.planes, study.planes_steps, study.planes_dim),
        _local(study.planes),
        Markup("<h2>The same planes with steps that never ascend</h2>"),
        _figure(
            *(folder, "descending"),
            "SaddleFree, which takes the absolute values of the plane's curvatures, and steps halved until the value "
            "does not rise; one draw of directions. What throws runs uphill above is the solver, not the planes. "
            "Newton is the paper's, for reference.",
        ),
        _runs(study, study.descending, study.planes_steps, study.planes_dim),
        _local(study.descending),
        fill("<p class='soft'>{text}</p>", text=", ".join(f"{k} {v}" for k, v in study.versions.items())),
    ]
    return fill(
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        "<title>{name}: forward-mode second-order steps</title>\n<style>{style}</style>\n</head>\n<body>\n{body}\n"
        "</body>\n</html>\n",
        name=name,
        style=Markup(_STYLE),
        body=join((part for part in parts if part), "\n"),
    )


def _verdict(holds: bool) -> Markup:
    return Markup("<span class='yes'>holds</span>" if holds else "<span class='no'>does not hold</span>")


def _forward_only(study: Study) -> str:
    """The plain statement about forward-only methods and those with backprop."""
    steps = study.comparison_steps
    curves = medians(study.comparison, steps, study.entry.minimum(study.entry.dim(2)))
    backprop = [label for label, one in contenders().items() if one.backprop]
    best = min(backprop, key=lambda label: curves[label][steps])
    sentences = []
    for label in ("FoMoH-2D", "FoMoH", "FGD", "FGD, 2 lr"):
        below = [other for other in backprop if curves[label][steps] < curves[other][steps]]
        if len(below) == len(backprop):
            where = f"is below all methods with backprop ({', '.join(backprop)})"
        elif below:
            where = f"is below {' and '.join(below)} only"
        else:
            where = f"is not below any method with backprop ({', '.join(backprop)})"
        sentences.append(f"{label} ({_number(curves[label][steps])}) {where}")
    least = f"the least of those with backprop is {best} ({_number(curves[best][steps])})"
    return f"After {steps} steps: {'; '.join(sentences)}; {least}."


def _runs(study: Study, rows: Sequence[Row], steps: int, dim: int) -> Markup:
    curves = medians(rows, steps, study.entry.minimum(dim))
    marks = sorted({min(mark, steps) for mark in (10, 30, 100, 300, steps)})
    body = []
    for label in sorted(curves, key=lambda label: curves[label][steps]):
        ends = Counter(row["end"] for row in rows if row["method"] == label)
        how = ", ".join(f"{count} {end}" for end, count in ends.most_common())
        body.append([label, *(_number(curves[label][mark]) for mark in marks), how])
    head = ["method", *(f"step {mark}" for mark in marks), "where the runs ended"]
    return _table(head, body, numbers=range(1, len(marks) + 1))


def _moments(study: Study) -> list[list[str]]:
    return [
        [r["axis"], r["method"], f"{r['mean']:.4g}", f"{r['sd']:.3g}", f"{r['newton']:.4g}"] for r in study.histograms
    ]


def _thrown(rows: Sequence[Row]) -> str:
    """How many runs of each K end above the median start."""
    level = statistics.median(row["values"][0] for row in rows)
    runs = Counter(row["method"] for row in rows)
    high = Counter(row["method"] for row in rows if row["end"] == "diverged" or row["values"][-1] > level / 10)
    if not high:
        return ""
    counts = ", ".join(f"{high[label]} of {runs[label]} for {label}" for label in runs if high[label])
    return fill(
        "<p>Thrown uphill: runs that end above a tenth of the median start ({level}) are {counts}. A median "
        "stays low only while fewer than half of the runs are, so it takes many runs to compare neighbouring K.</p>",
        level=_number(level),
        counts=counts,
    )


def _local(rows: Sequence[Row]) -> Markup:
    found = [row for row in rows if row["end"] == "local minimum"]
    if not found:
        return Markup("<p>No run of this comparison ended in a local minimum.</p>")
    groups: dict[str, list[Row]] = {}
    for row in found:
        groups.setdefault(f"{row['values'][-1]:.2f}", []).append(row)
    texts = []
    for value, group in sorted(groups.items(), key=lambda item: float(item[0])):
        counts = Counter(row["method"] for row in group)
        texts.append(f"{len(group)} near {value} ({', '.join(f'{n} of {label}' for label, n in counts.items())})")
    return fill("<p>Runs that ended in a local minimum, or are settling in one: {text}.</p>", text="; ".join(texts))


def _number(value: float) -> str:
    if math.isinf(value):
        return "diverged"
    return "0" if value == 0 else f"{value:.1e}"


def _table(head: Sequence[str], body: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> Markup:
    def row(cells: Sequence[str], tag: str) -> Markup:
        marked = (
            fill(f"<{tag}{' class=n' * (i in numbers)} data-label='{{label}}'>{{cell}}</{tag}>", label=label, cell=cell)
            for i, (cell, label) in enumerate(zip(cells, head, strict=True))
        )
        return fill("<tr>{cells}</tr>", cells=join(marked))

    lines = [row(head, "th"), *(row(cells, "td") for cells in body)]
    return fill("<div class='wide'><table>\n{lines}\n</table></div>", lines=join(lines, "\n"))


def _figure(folder: Path, name: str, caption: str) -> Markup:
    light, dark = (_inline(folder / f"{name}{suffix}") for suffix in (".png", "-dark.png"))
    if not light:
        return fill("<p class='soft'>(No figure was drawn.) {caption}</p>", caption=caption)
    return fill(
        "<figure><picture><source srcset='{dark}' media='(prefers-color-scheme: dark)'>"
        "<img src='{light}' alt='{name} figure'></picture><figcaption>{caption}</figcaption></figure>",
        **{"dark": dark, "light": light, "name": name, "caption": caption},
    )


def _inline(path: Path) -> str:
    if not path.exists():
        return ""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
