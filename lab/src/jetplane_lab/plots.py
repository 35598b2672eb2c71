"""The figures of the Rosenbrock study, drawn from its rows. matplotlib is imported when the first one is drawn.

Each figure comes in a light and a dark version; colours are those of Okabe and Ito, which colour-blind readers can tell
apart, and every method has its own line style as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .functions import TestFunction
from .inlined import Drawn, drawn
from .records import Row
from .rosenbrock import medians

__all__ = ["FLOOR", "SUFFIXES", "comparison", "histograms", "inlined", "planes", "save", "single_step"]

SUFFIXES = (".png", ".svg", "-dark.png")
FLOOR = 1e-16  # values below are drawn here

# label -> (Okabe-Ito colour in light, in dark, line style)
_STYLE: dict[str, tuple[str, str, Any]] = {
    "FGD": ("#E69F00", "#E69F00", "-"),
    "FGD, 2 lr": ("#E69F00", "#E69F00", (0, (3, 1.5))),
    "SGD": ("#7a7a7a", "#a8a8a8", "-"),
    "Adam": ("#7a7a7a", "#a8a8a8", (0, (3, 1.5))),
    "FoMoH-BP": ("#CC79A7", "#E39AC3", "-"),
    "FoMoH": ("#0072B2", "#56B4E9", "-"),
    "FoMoH-2D": ("#009E73", "#1BC79A", "-"),
    "Newton": ("#000000", "#ffffff", (0, (1, 1.2))),
}
# the page's variables for the colours on light paper
_ROLES = {"#1f2328": ("ink", "#1f2328"), "#ffffff": ("paper", "#ffffff"), "#000000": ("ink", "#000000")}
_NAMES = {"FGD": "c0", "SGD": "c6", "FoMoH-BP": "c4", "FoMoH": "c1", "FoMoH-2D": "c2"}
_ROLES |= {_STYLE[label][0].lower(): (name, _STYLE[label][0]) for label, name in _NAMES.items()}
_INK = {False: "#1f2328", True: "#e6e6e6"}
_PAPER = {False: "#ffffff", True: "#16181d"}

Figure = Any


def _colour(label: str, dark: bool) -> str:
    return _STYLE[label][1 if dark else 0]


@contextmanager
def _theme(dark: bool) -> Iterator[Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ink, paper = _INK[dark], _PAPER[dark]
    settings: dict[Any, Any] = {
        **{"figure.facecolor": paper, "axes.facecolor": paper, "savefig.facecolor": paper, "legend.facecolor": paper},
        **{"text.color": ink, "axes.edgecolor": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink},
        **{"grid.color": ink, "grid.alpha": 0.15, "grid.linewidth": 0.6, "axes.grid": True, "axes.axisbelow": True},
        **{"axes.spines.top": False, "axes.spines.right": False, "font.size": 11, "axes.titlesize": 12},
        **{"legend.frameon": False, "svg.hashsalt": "jetplane", "figure.constrained_layout.use": True},
    }
    with matplotlib.rc_context(settings):
        yield pyplot


def save(draw: Callable[[bool], Figure], folder: Path, name: str) -> list[Path]:
    """Save a figure as PNG and SVG, and as PNG on dark paper."""
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for dark in (False, True):
        figure = draw(dark)
        for suffix in ("-dark.png",) if dark else (".png", ".svg"):
            path = folder / f"{name}{suffix}"
            metadata = {"Date": None} if suffix == ".svg" else {}
            figure.savefig(path, dpi=150, metadata=metadata)
            paths.append(path)
        pyplot.close(figure)
    return paths


def inlined(draw: Callable[[bool], Figure]) -> Drawn:
    """A figure for a page, whose colours follow the reader's light or dark setting."""
    from matplotlib import pyplot

    figure = draw(False)
    try:
        return drawn(figure, _ROLES)
    finally:
        pyplot.close(figure)


# -- one step -----------------------------------------------------------------------------------------------------


def single_step(entry: TestFunction, rows: Sequence[Row], dark: bool = False) -> Figure:
    """Samples of FGD's and FoMoH's step from one point, their means, and the steps of FoMoH-BP and Newton."""
    data = {row["key"]: row for row in rows}
    point = torch.tensor(data["point"]["point"], dtype=torch.float64)
    ends = {m: point + torch.tensor(r["steps"], dtype=torch.float64) for m, r in data.items() if m != "point"}
    means = {method: end.mean(0) for method, end in ends.items()}
    with _theme(dark) as pyplot:
        figure, axes = pyplot.subplots(figsize=(7.2, 6.2))
        window = _window(point, ends, means)
        _contours(axes, entry, window, dark)
        for method in ("FGD", "FoMoH"):
            shown = ends[method][:3000]
            colour = _colour(method, dark)
            axes.scatter(
                *shown.T, s=5, color=colour, alpha=0.22, linewidths=0, rasterized=True, zorder=2, label="_nolegend_"
            )
        labels = {
            "FGD": "FGD: samples and mean",
            "FoMoH": "FoMoH: samples and mean",
            "FoMoH-BP": "FoMoH-BP",
            "FoMoH-2D": "FoMoH-2D: mean",
            "Newton": "Newton",
        }
        for method, label in labels.items():
            (x0, y0), (x1, y1) = point.tolist(), means[method].tolist()
            width = {"Newton": 2.4, "FoMoH-2D": 5.0}.get(method, 2.4)
            style = _STYLE[method][2] if method == "Newton" else "-"
            axes.plot([x0, x1], [y0, y1], color=_PAPER[dark], linewidth=width + 2, zorder=3, solid_capstyle="round")
            axes.plot([x0, x1], [y0, y1], color=_colour(method, dark), linewidth=width, linestyle=style, zorder=4)
            marker = {"FoMoH-BP": "s", "Newton": "x", "FoMoH-2D": "D"}.get(method, "o")
            axes.plot(
                *(x1, y1, marker),
                color=_colour(method, dark),
                markersize=10 if method == "FoMoH-2D" else 7,
                markeredgecolor=_colour(method, dark) if marker == "x" else _PAPER[dark],
                markeredgewidth=2.2 if marker == "x" else 1,
                linestyle="none",
                zorder=6 if method == "Newton" else 5,
                label=label,
            )
        axes.plot(*point.tolist(), "o", color=_INK[dark], markersize=8, zorder=7, label="start")
        for number, minimum in enumerate(entry.minima(len(point))):
            axes.plot(
                *(*minimum.tolist(), "*"),
                **{"color": "#F0E442", "markeredgecolor": "black", "markersize": 15, "zorder": 7, "linestyle": "none"},
                label="_nolegend_" if number else "minimum",
            )
        axes.set(xlim=window[:2], ylim=window[2:], xlabel="$x_1$", ylabel="$x_2$")
        count = len(data["FGD"]["steps"])
        axes.set_title(f"One step on the {_title(entry)} function: mean of {count:,} samples")
        axes.grid(False)
        legend = axes.legend(loc="best", fontsize=9.5, frameon=True, framealpha=0.92)
        legend.get_frame().set_linewidth(0)
    return figure


def _window(point: Any, ends: dict[str, Any], means: dict[str, Any]) -> tuple[float, float, float, float]:
    """A box around the middle of the samples and all that is drawn whole."""
    tails = torch.tensor([0.02, 0.98], dtype=torch.float64)
    middle = [torch.quantile(ends[method], tails, dim=0) for method in ("FGD", "FoMoH")]
    shown = torch.cat([point[None], torch.stack(list(means.values())), *middle])
    low, high = shown.min(0).values, shown.max(0).values
    margin = 0.12 * (high - low).clamp_min(1e-3 * float((high - low).max()) + 1e-12)
    (x0, y0), (x1, y1) = (low - margin).tolist(), (high + margin).tolist()
    return x0, x1, y0, y1


def _contours(axes: Any, entry: TestFunction, window: tuple[float, float, float, float], dark: bool) -> None:
    x, y = torch.meshgrid(
        *(torch.linspace(*window[:2], 241, dtype=torch.float64), torch.linspace(*window[2:], 241, dtype=torch.float64)),
        indexing="xy",
    )
    z = torch.vmap(entry.function)(torch.stack([x.flatten(), y.flatten()], dim=1)).reshape(x.shape)
    z = (z - entry.minimum(2)).clamp_min(1e-12).log10()
    top = float(z.max())
    levels = torch.linspace(max(float(z.min()), top - 4), top, 16)[1:].tolist()
    axes.contour(
        *(x.numpy(), y.numpy(), z.numpy(), levels),
        colors=_INK[dark],
        linewidths=0.7,
        alpha=0.3,
        linestyles="-",
        zorder=1,
    )


def histograms(rows: Sequence[Row], dark: bool = False) -> Figure:
    """How the sampled steps are distributed along each axis; the count is logarithmic, as FoMoH-2D is one spike."""
    axes_names = list(dict.fromkeys(row["axis"] for row in rows))
    with _theme(dark) as pyplot:
        across = 2
        down = math.ceil(len(axes_names) / across)
        figure, grid = pyplot.subplots(down, across, figsize=(10.4, 3.5 * down), squeeze=False)
        for axes, name in zip(grid.flat, axes_names, strict=False):
            group = [row for row in rows if row["axis"] == name]
            for row in group:
                colour = _colour(row["method"], dark)
                axes.stairs(row["counts"], row["edges"], color=colour, linewidth=1.6, label=row["method"], zorder=3)
                axes.stairs(row["counts"], row["edges"], color=colour, fill=True, alpha=0.18, zorder=2)
                axes.axvline(row["mean"], color=colour, linewidth=1.4, linestyle=(0, (4, 2)), zorder=4)
            axes.axvline(group[0]["newton"], color=_colour("Newton", dark), linewidth=1.8, linestyle=":", zorder=5)
            axes.set(yscale="log", xlabel=f"step, {name}", ylabel="samples", ylim=(0.7, None))
        handles, labels = grid.flat[0].get_legend_handles_labels()
        handles += [
            pyplot.Line2D([], [], color=_INK[dark], linewidth=1.4, linestyle=(0, (4, 2))),
            pyplot.Line2D([], [], color=_colour("Newton", dark), linewidth=1.8, linestyle=":"),
        ]
        figure.legend(handles, [*labels, "mean (same colour)", "Newton"], loc="outside upper center", ncols=5)
    return figure


# -- runs ---------------------------------------------------------------------------------------------------------


def comparison(entry: TestFunction, rows: Sequence[Row], steps: int, dim: int, dark: bool = False) -> Figure:
    """Every run of every method, the medians thick."""
    labels = [label for label in _STYLE if any(row["method"] == label for row in rows)]
    styles = {label: (_colour(label, dark), _STYLE[label][2]) for label in labels}
    return _curves(entry, rows, steps, dim, styles, f"{_title(entry)}, {dim}D", dark)


def planes(entry: TestFunction, rows: Sequence[Row], steps: int, dim: int, what: str, dark: bool = False) -> Figure:
    """FoMoH-KD for every K, from yellow or light to dark, and Newton dotted."""
    with _theme(dark) as pyplot:
        labels = [label for label in dict.fromkeys(row["method"] for row in rows) if label != "Newton"]
        spread = [0.9 - 0.85 * i / max(1, len(labels) - 1) for i in range(len(labels))]
        colours = pyplot.get_cmap("viridis")([0.12 + 0.88 * (0.95 - s) if dark else s for s in spread])
    styles: dict[str, tuple[Any, Any]] = {label: (c, "-") for label, c in zip(labels, colours, strict=True)}
    styles["Newton"] = (_colour("Newton", dark), _STYLE["Newton"][2])
    title = f"{_title(entry)}, {dim}D: {what} in planes of K directions"
    return _curves(entry, rows, steps, dim, styles, title, dark)


def _curves(
    entry: TestFunction,
    rows: Sequence[Row],
    steps: int,
    dim: int,
    styles: dict[str, tuple[Any, Any]],
    title: str,
    dark: bool,
) -> Figure:
    level = entry.minimum(dim)
    curves = medians(rows, steps, level)
    with _theme(dark) as pyplot:
        figure, axes = pyplot.subplots(figsize=(8.2, 5.4))
        for row in (row for row in rows if row["draw"] == 0):  # more would hide the medians
            values = [value - level for value in row["values"]]
            if row["end"] != "diverged":
                values += [values[-1]] * (steps + 1 - len(values))
            axes.plot(*_thin(values), color=styles[row["method"]][0], alpha=0.2, linewidth=0.8, zorder=2)
        top = 0.0
        for label, (colour, style) in styles.items():
            x, y = _thin([value for value in curves[label] if math.isfinite(value)])
            newton = label == "Newton"
            axes.plot(*(x, y), color=colour, linestyle=style, linewidth=2.6, zorder=5 if newton else 4, label=label)
            top = max([top, *y[:1], *(value for value in y if value < 1e6)])
        low = min(min(_thin(curve)[1]) for curve in curves.values())
        axes.set(xscale="log", yscale="log", xlim=(1, steps + 1), title=title)
        axes.set_ylim(max(FLOOR, low) / 3, 30 * top)
        axes.set(xlabel="step + 1", ylabel="value above the minimum" if level else "value")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=2.6)
    return figure


def _thin(values: Sequence[float], count: int = 240) -> tuple[list[int], list[float]]:
    """So many points of a curve, evenly spaced on the log scale, with x = step + 1 and nothing below the floor."""
    last = len(values) - 1
    if last < 0:
        return [], []
    ratio = math.log(last + 1) / (count - 1)
    picked = sorted({min(last, round(math.exp(i * ratio)) - 1) for i in range(count)})
    return [i + 1 for i in picked], [max(FLOOR, values[i]) for i in picked]


def _title(entry: TestFunction) -> str:
    return "-".join(word.capitalize() for word in entry.name.split("-"))
