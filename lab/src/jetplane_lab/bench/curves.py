"""Time and memory against K, batch and depth, with the fitted laws. matplotlib is imported when a figure is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jetplane_lab.plots import save

from .growth import AXES, SHARED, series

__all__ = ["draw"]

Row = dict[str, Any]
Key = tuple[Any, ...]

# Okabe and Ito's colours, which colour-blind readers can tell apart, and a marker of its own for every system
_OURS = {"jetplane": "#0072B2", "jetplane-compiled": "#009E73"}
_PEERS = ("#E69F00", "#D55E00", "#CC79A7", "#56B4E9", "#B8A800", "#7a7a7a")
_MARKERS = "osD^v<>PX*phd"
_LABELS = {"k": "K", "batch": "batch", "depth": "depth"}
_QUANTITIES = {"median_ms": "time (ms)", "peak_mib": "peak memory (MiB)"}


def draw(rows: Sequence[Row], laws: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw a figure for every model and axis with enough points, and return the files."""
    paths: list[Path] = []
    for name, axis, shared in _figures(rows):
        paths += save(_figure(rows, laws, axis, shared), folder, name)
    return paths


def _figures(rows: Sequence[Row]) -> Iterator[tuple[str, str, Key]]:
    for axis in AXES:
        groups = dict.fromkeys(shared[:-1] for shared in series(rows, axis, "median_ms"))
        for group in groups:
            yield "-".join([axis, *_words(axis, group)]).replace(" ", ""), axis, group


def _words(axis: str, group: Key) -> list[str]:
    """What all points of a figure share, in words."""
    names = [name for name in SHARED if name != axis]
    words = []
    for name, value in zip(names, group, strict=True):
        if name in AXES:
            words += [f"{_LABELS[name]} {value}"] if value else []  # a model without a depth has depth 0
        else:
            words.append(str(value))
    return words


def _figure(rows: Sequence[Row], laws: Sequence[dict[str, Any]], axis: str, group: Key) -> Callable[[bool], Any]:
    def make(dark: bool) -> Any:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot, ticker

        ink, paper = ("#e6e6e6", "#16181d") if dark else ("#1f2328", "#ffffff")
        settings: dict[Any, Any] = {
            **{"figure.facecolor": paper, "axes.facecolor": paper, "savefig.facecolor": paper, "text.color": ink},
            **{"axes.edgecolor": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink},
            **{"xtick.labelcolor": ink, "grid.color": ink, "grid.alpha": 0.15, "axes.grid": True},
            **{"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "jetplane"},
            **{"legend.frameon": False, "figure.constrained_layout.use": True},
        }
        systems = list(dict.fromkeys(row["system"] for row in rows))
        with matplotlib.rc_context(settings):
            figure, axes = pyplot.subplots(1, 2, figsize=(10.5, 4.4))
            for panel, (quantity, label) in zip(axes, _QUANTITIES.items(), strict=True):
                _panel(panel, rows, laws, axis, group, quantity, systems)
                panel.set(xscale="log", yscale="log", xlabel=_LABELS[axis], ylabel=label)
                ticks = sorted({x for points in _lines(rows, axis, group, quantity).values() for x, _ in points})
                panel.set_xticks(ticks, [str(tick) for tick in ticks])
                panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
                panel.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
                panel.minorticks_off()
            handles, labels = axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside right center", fontsize=8.5)
            figure.suptitle(", ".join(_words(axis, group)), fontsize=11)
        return figure

    return make


def _lines(rows: Sequence[Row], axis: str, group: Key, quantity: str) -> dict[str, list[tuple[int, float]]]:
    found = series(rows, axis, quantity)
    return {shared[-1]: points for shared, points in found.items() if shared[:-1] == group}


def _panel(
    panel: Any,
    rows: Sequence[Row],
    laws: Sequence[dict[str, Any]],
    axis: str,
    group: Key,
    quantity: str,
    systems: list[str],
) -> None:
    lines = _lines(rows, axis, group, quantity)
    for system, points in lines.items():
        number = systems.index(system)
        ours = system in _OURS
        colour = _OURS.get(system, _PEERS[number % len(_PEERS)])
        law = next(
            law
            for law in laws
            if (law["axis"], law["quantity"], law["system"]) == (axis, quantity, system)
            and law["points"] == [list(point) for point in points]
        )
        exponent = law["power"]["exponent"] if "power" in law else float("nan")
        panel.plot(
            *([x for x, _ in points], [y for _, y in points]),
            color=colour,
            marker=_MARKERS[number % len(_MARKERS)],
            linewidth=2.2 if ours else 1.1,
            markersize=6 if ours else 4.5,
            zorder=3 if ours else 2,
            label=f"{system}: time ~ {_LABELS[axis]}^{exponent:.2f}",
        )
        if "polynomial" in law:
            low, high = points[0][0], points[-1][0]
            grid = [low * (high / low) ** (step / 60) for step in range(61)]
            coefficients = law["polynomial"]["coefficients"]
            values = [sum(c * x**n for n, c in enumerate(coefficients)) for x in grid]
            panel.plot(grid, values, color=colour, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
