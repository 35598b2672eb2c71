"""Training curves, drawn by matplotlib and put into the page as SVG: lines with bands of one standard deviation.

Each metric has a panel over steps, over passes and over seconds; the page shows those of the axis that is chosen. Axes
span large ranges on a logarithm. Accuracies are drawn as errors, in per cent: on a logarithm they keep 97% and 98% as
far apart as 94% and 96%.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..inlined import COLOURS, INK, PAPER, SOFT, Drawn, drawn, settings
from ..markup import Markup, fill, join
from .groups import AXES, METRICS, Curve, Group, Section

__all__ = ["POINTS", "Panel", "cost_of_steps", "figure", "panels", "results", "style_class", "value"]

POINTS = 120  # of a line: more would not show on half of a page
_WIDTH, _HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 26, 40
_DOTTED = 20  # up to so many points each is marked
_LEAST_ERROR, _LEAST_NLL = 0.01, 1e-4  # in per cent, in nats: 0 has no place on a logarithm
_HIGHEST_NLL = 5.0  # a guess at random has 2.3; what is far above leaves the panel
_LOG_FROM = 30.0  # an axis whose ends are so many times apart is logarithmic

_METHODS = {"fgd": 0, "fomoh": 1, "fomoh-bp": 4, "backprop": 5, "sgd": 5, "adam": 6}
_METHODS |= {"gauss-newton": 8, "forward-sgd": 7, "forward-adam": 9, "horizon": 10, "mezo": 3, "fzoo": 2}
_PLANES = (2, 3, 7, 8)  # FoMoH-2D, -3D and larger
_DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1.4, 1.6)), (0, (6, 2, 2, 2)))


def _style(group: Group, among: Sequence[Group]) -> tuple[int, int]:
    """Numbers of a line's colour, which is the method's, and dashes, which tell rows of one method apart."""
    method, k = group.config.method, group.config.k
    colour = _PLANES[min(max(k, 2), 5) - 2] if method == "fomoh-kd" else _METHODS[method]
    if method == "fgd" and k > 1:
        colour = 7
    same = [other for other in among if (other.config.method, other.config.k) == (method, k)]
    dash = same.index(group) % len(_DASHES)
    # a schedule is dashed even where the row without it is missing
    return colour, dash or 1 if group.scheduled else dash


def style_class(group: Group, among: Sequence[Group]) -> str:
    """The classes of a line's key."""
    colour, dash = _style(group, among)
    return f"c{colour} d{dash}"


def value(metric: str, number: float) -> float:
    """What is drawn: a loss, or the error in per cent."""
    return 100 * (1 - number) if metric.endswith("accuracy") else number


def title(metric: str) -> str:
    """What a panel shows, with its unit."""
    name = METRICS[metric]
    return f"{name.removesuffix('accuracy')}error (%)" if name.endswith("accuracy") else f"{name} (nats)"


# -- curves -------------------------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """One drawing: its metric and axis, and the SVG."""

    metric: str
    axis: str
    drawing: Drawn
    attributes: dict[str, object]

    def inline(self) -> Markup:
        """The element of the page, with what the read-outs need."""
        named = " ".join(f"data-{name}='{{{name}}}'" for name in self.attributes if name != "about")
        return self.drawing.inline(f"class=panel {named} aria-label='{{about}}'", **self.attributes)


def figure(key: str, section: Section, found: Sequence[Panel], caption: str) -> Markup:
    """The panels with a legend and a choice of the axis. ``key`` names the curves' data in the page."""
    groups = section.groups
    one = (
        "<li><button type=button class='key {style}' data-row={number} aria-pressed=true>"
        "<svg viewBox='0 0 28 10' aria-hidden=true><path class=mean d='M1 5H27'/></svg>{label}</button></li>"
    )
    choice = (
        "<label><input type=radio name='{key}-axis' value={axis}{checked}> {name}</label>",
        "<div class='panels by-{axis}'>{panels}</div>",
    )
    axes = [axis for axis in AXES if any(panel.axis == axis for panel in found)]
    return fill(
        "<figure class=curves data-curves='{key}'><div class=choice>against {axes}</div><ul class=legend>{keys}</ul>"
        "{panels}<figcaption>{caption}</figcaption></figure>",
        key=key,
        axes=join(
            fill(choice[0], key=key, axis=axis, name=axis, checked=Markup(" checked" * (axis == axes[0])))
            for axis in axes
        ),
        keys=join(fill(one, style=style_class(g, groups), number=n, label=g.label) for n, g in enumerate(groups)),
        panels=join(
            fill(choice[1], axis=axis, panels=join(panel.inline() for panel in found if panel.axis == axis))
            for axis in axes
        ),
        caption=caption,
    )


def panels(section: Section) -> list[Panel]:
    """A panel of each metric over each axis that was recorded."""
    return [panel for axis in AXES for metric in METRICS if (panel := _panel(metric, axis, section.groups)) is not None]


def _panel(metric: str, axis: str, groups: Sequence[Group]) -> Panel | None:
    from matplotlib.figure import Figure

    curves = [(number, group, group.curve(metric, POINTS)) for number, group in enumerate(groups)]
    curves = [(number, group, curve) for number, group, curve in curves if curve.epochs and curve.along[axis]]
    if not curves:
        return None
    places = [x for _, _, curve in curves for x in (curve.along[axis][0], curve.along[axis][-1])]
    first, last = min(places), max(places)
    log = first > 0 and last / first >= _LOG_FROM
    first, last = _padded(first, last if last > first else first + 1, log)
    with settings():
        drawing = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72), dpi=72)
        inner = (_WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM)
        axes = drawing.add_axes((_LEFT / _WIDTH, _BOTTOM / _HEIGHT, inner[0] / _WIDTH, inner[1] / _HEIGHT))
        for number, group, curve in curves:
            _line(axes, number, _style(group, groups), curve.along[axis], _shown(metric, curve))
        axes.set_title(title(metric), loc="left", fontweight="bold")
        axes.set_xlabel(AXES[axis].label)
        axes.set_xlim(first, last)
        _scale(axes, "x", (first, last), log, most=6)
        low, high = _limits(metric, [value(metric, mean) for _, _, curve in curves for mean in curve.mean])
        axes.set_ylim(low, high)
        _scale(axes, "y", (low, high), True, most=8)
    attributes: dict[str, object] = {
        **{"metric": metric, "axis": axis, "scale": "log" if log else "linear", "first": first, "last": last},
        **{"left": _LEFT, "inner": inner[0]},
        "about": f"{title(metric)} over {AXES[axis].label}: "
        + "; ".join(f"{group.label} ends at {value(metric, curve.mean[-1]):.4g}" for _, group, curve in curves),
    }
    return Panel(metric, axis, drawn(drawing), attributes)


def _padded(first: float, last: float, log: bool) -> tuple[float, float]:
    """With room for the marks at both ends."""
    if log:
        share = (last / first) ** 0.02
        return first / share, last * share
    return first - 0.02 * (last - first), last + 0.02 * (last - first)


def _shown(metric: str, curve: Curve) -> tuple[list[float], list[float]]:
    """The line and its spread in what is drawn."""
    scale, least = (100, _LEAST_ERROR) if metric.endswith("accuracy") else (1, _LEAST_NLL)
    return [max(value(metric, mean), least) for mean in curve.mean], [scale * std for std in curve.std]


def _line(axes: Any, number: int, style: tuple[int, int], x: list[float], y: tuple[list[float], list[float]]) -> None:
    colour, dash = COLOURS[style[0]], _DASHES[style[1]]
    means, stds = y
    if not math.isnan(stds[0]) and len(means) > 1:
        low = [max(m - s, _LEAST_NLL) for m, s in zip(means, stds, strict=True)]
        high = [m + s for m, s in zip(means, stds, strict=True)]
        band = axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        band.set_gid(f"row-{number}")
    marker = "o" if len(means) <= _DOTTED else None
    (line,) = axes.plot(x, means, color=colour, linestyle=dash, linewidth=1.7, marker=marker, markersize=4)
    line.set_gid(f"row-{number}")


def _limits(metric: str, values: Sequence[float]) -> tuple[float, float]:
    low, high = max(min(values), _LEAST_ERROR if metric.endswith("accuracy") else _LEAST_NLL), max(values)
    high = max(low * 1.01, high if metric.endswith("accuracy") else min(high, _HIGHEST_NLL))
    return low / 1.08, high * 1.08


def _scale(axes: Any, which: str, ends: tuple[float, float], log: bool, most: int) -> None:
    """A linear or logarithmic axis with at most so many ticks, at round numbers."""
    from matplotlib import ticker

    axis, (low, high) = getattr(axes, f"{which}axis"), ends
    if log:
        axes.set(**{f"{which}scale": "log"})
        axis.set_major_locator(ticker.FixedLocator(list(_round(low, high, most))))
        axis.set_minor_locator(ticker.NullLocator())
    else:
        axis.set_major_locator(ticker.MaxNLocator(most, integer=high - low >= most))
    axis.set_major_formatter(ticker.FuncFormatter(lambda number, _: _short(number)))
    axis.set_tick_params(length=3)


def _round(low: float, high: float, most: int) -> Iterator[float]:
    """Round numbers between two: as dense a choice among decades as fits."""
    dense: tuple[Sequence[float], ...] = ([n / 100 for n in range(100, 1000, 2)], [n / 20 for n in range(20, 200)])
    dense = (*dense, [n / 10 for n in range(10, 100)], [n / 10 for n in range(10, 100, 2)])
    dense = (*dense, [1, 1.5, *range(2, 10)], [1, 1.5, 2, 3, 4, 5, 7], [1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1])
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for among in dense:
        found = [n * 10.0**e for e in decades for n in among if low <= n * 10.0**e <= high]
        if len(found) <= most:
            break
    yield from found


def _short(number: float) -> str:
    """A number on an axis.

    >>> [_short(number) for number in (0.05, 2.0, 1500.0, 30000.0, 2e6)]
    ['0.05', '2', '1500', '30k', '2M']
    """
    for size, name in ((1e6, "M"), (1e3, "k")):
        if number >= 10_000 and number >= size:
            return f"{number / size:g}{name}"
    return f"{number:.4g}"


# -- the result ---------------------------------------------------------------------------------------------------


def results(section: Section) -> Drawn:
    """The error of every row at the last epoch, the best first, with backprop's as a line."""
    rows = [(group, group.final("validation_accuracy")) for group in section.ranked]
    shown = [(group, value("validation_accuracy", s.mean), 100 * s.std) for group, s in rows]
    texts = [f"{error:.2f}" + (f" ± {std:.2f}" if not math.isnan(std) else "") + "%" for _, error, std in shown]
    base = section.baseline
    line = next((error for group, error, _ in shown if group is base), None)
    return _dots(section, shown, texts, "Error on validation (%) after the last epoch: less is better", line)


def cost_of_steps(section: Section) -> Drawn:
    """What a step of every row costs, in the same order."""
    shown = [(group, group.passes_per_epoch, math.nan) for group in section.ranked]
    shown = [row for row in shown if not math.isnan(row[1])]
    line = next((passes for group, passes, _ in shown if group is section.baseline), None)
    texts = [f"{passes:.1f} passes" for _, passes, _ in shown]
    return _dots(section, shown, texts, "Cost of a step (forward passes of its batch)", line)


def _dots(
    section: Section, rows: Sequence[tuple[Group, float, float]], texts: list[str], heading: str, line: float | None
) -> Drawn:
    """A dot for each row, with its name and number above it."""
    from matplotlib.figure import Figure

    height = 30 * len(rows) + 64
    with settings(**{"axes.spines.left": False}):
        drawing = Figure(figsize=(_WIDTH / 72, height / 72), dpi=72)
        axes = drawing.add_axes((10 / _WIDTH, 30 / height, (_WIDTH - 24) / _WIDTH, (height - 60) / height))
        values = [max(number, _LEAST_ERROR) for _, number, _ in rows]
        low, high = min(values) / 1.25, max(values) * 1.25
        axes.set_xlim(low, high)
        axes.set_ylim(len(rows) - 0.35, -0.75)
        _scale(axes, "x", (low, high), True, most=6)
        axes.set_yticks([])
        if line is not None:
            axes.axvline(max(line, _LEAST_ERROR), color=INK, linewidth=1, linestyle=(0, (3, 2)))
        for place, ((group, _, std), number, text) in enumerate(zip(rows, values, texts, strict=True)):
            colour = COLOURS[_style(group, section.groups)[0]]
            axes.plot([low, number], [place, place], color=colour, linewidth=2.2, alpha=0.45, zorder=5)
            axes.plot(
                [number],
                [place],
                color=colour,
                marker="s" if group.reverse else "o",
                markersize=7,
                clip_on=False,
                zorder=6,
            )
            if not math.isnan(std):
                ends = [max(number - std, low), number + std]
                axes.plot(ends, [place, place], color=colour, linewidth=2.2, zorder=6)
            behind = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8}
            beside: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "bbox": behind, "fontsize": 11}
            axes.text(0, place - 0.24, group.label, **beside)
            axes.text(1, place - 0.24, text, ha="right", color=SOFT, **beside)
        axes.set_title(heading, loc="left", fontweight="bold", fontsize=12)
    return drawn(drawing)
