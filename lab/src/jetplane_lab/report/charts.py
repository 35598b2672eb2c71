"""Training curves as SVG in the page: lines over epochs with bands of one standard deviation.

Drawn here and not by a plotting library: the page needs no other file or package, text stays text, and colours follow
the reader's light or dark setting through CSS variables. Epochs are on a logarithmic axis once there are many, and
accuracies on the logarithm of their error, which keeps 0.97 and 0.98 as far apart as 0.94 and 0.96.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..markup import Markup, anchor, fill, join
from .groups import METRICS, Curve, Group

__all__ = ["POINTS", "figure", "style_class"]

POINTS = 160  # of a line: more would not show on half of a page
_WIDTH, _HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 26, 36
_DOTTED = 20  # up to so many epochs each is marked
_LEAST_ERROR = 1e-4  # an accuracy of 1 has no place on a logarithm of the error
_HIGHEST_NLL = 5.0  # a guess at random has 2.3; what is far above leaves the panel

_COLOURS = {"fgd": 0, "fomoh": 1, "fomoh-bp": 4, "backprop": 5, "sgd": 5, "adam": 6}
_COLOURS |= {"gauss-newton": 8, "forward-sgd": 7, "forward-adam": 9, "horizon": 10}
_PLANES = (2, 3, 7, 8)  # FoMoH-2D, -3D and larger
_DASHES = ("", "6 3", "2 2.5", "9 3 2 3")


class _Axis(NamedTuple):
    """A scale: from a value to 0..1, and where its ticks are."""

    place: Callable[[float], float]
    ticks: list[tuple[float, str]]


def style_class(group: Group, among: Sequence[Group]) -> str:
    """The classes of a line: its colour is the method's, its dashes tell rows of one method apart."""
    method, k = group.config.method, group.config.k
    colour = _PLANES[min(max(k, 2), 5) - 2] if method == "fomoh-kd" else _COLOURS[method]
    if method == "fgd" and k > 1:
        colour = 7
    same = [other for other in among if (other.config.method, other.config.k) == (method, k)]
    dash = same.index(group) % len(_DASHES)
    # a schedule is dashed even where the row without it is missing
    return f"c{colour} d{dash or 1 if group.scheduled else dash}"


def figure(key: str, groups: Sequence[Group], among: Sequence[Group], caption: str) -> Markup:
    """Four panels with a legend. ``key`` names the curves' data in the page; rows are numbered as in ``among``."""
    rows = [(among.index(group), group) for group in groups]
    one = (
        "<li><button type=button class='key {style}' data-row={number} aria-pressed=true>"
        "<svg viewBox='0 0 28 10' aria-hidden=true><path class=mean d='M1 5H27'/></svg>{label}</button></li>"
    )
    return fill(
        "<figure class=curves data-curves='{key}'><ul class=legend>{keys}</ul>"
        "<div class=panels>{panels}</div><figcaption>{caption}</figcaption></figure>",
        key=key,
        keys=join(fill(one, style=style_class(g, among), number=number, label=g.label) for number, g in rows),
        panels=join(_panel(key, metric, title, rows, among) for metric, title in METRICS.items()),
        caption=caption,
    )


def _panel(key: str, metric: str, title: str, rows: Sequence[tuple[int, Group]], among: Sequence[Group]) -> Markup:
    curves = [(number, group, group.curve(metric, POINTS)) for number, group in rows]
    curves = [(number, group, curve) for number, group, curve in curves if curve.epochs]
    if not curves:
        return fill("<p class=soft>No {title} was recorded.</p>", title=title)
    epochs = [epoch for _, _, curve in curves for epoch in (curve.epochs[0], curve.epochs[-1])]
    values = [value for _, _, curve in curves for value in curve.mean]
    x = _epoch_axis(min(epochs), max(epochs))
    y = _accuracy_axis(values) if metric.endswith("accuracy") else _nll_axis(values)
    inner_w, inner_h = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    scale = "log" if max(epochs) >= _LOG_FROM else "linear"
    return fill(
        f"<svg class=panel viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img data-metric='{{metric}}' data-scale={scale} "
        f"data-first={min(epochs)} data-last={max(epochs)} data-left={_LEFT} data-inner={inner_w} "
        "aria-label='{title} over epochs: {described}'>"
        f"<text class=title x={_LEFT} y=15>{{title}}</text>{{grid}}"
        f"<clipPath id='{{clip}}'><rect x={_LEFT} y={_TOP} width={inner_w} height={inner_h} /></clipPath>"
        "<g clip-path='url(#{clip})'>{lines}</g>"
        f"<text class=axis x={_LEFT + inner_w / 2:g} y={_HEIGHT - 4} text-anchor=middle>epoch</text></svg>",
        metric=metric,
        title=title,
        described="; ".join(f"{group.label} ends at {curve.mean[-1]:.4g}" for _, group, curve in curves),
        grid=join(_grid(x, y)),
        clip=f"clip-{anchor(key)}-{len(rows)}-{metric}",
        lines=join(_line(number, style_class(group, among), curve, x, y) for number, group, curve in curves),
    )


def _line(number: int, style: str, curve: Curve, x: _Axis, y: _Axis) -> Markup:
    def point(epoch: float, value: float) -> str:
        return f"{_across(x.place(epoch)):.1f} {_down(y.place(value)):.1f}"

    mean = "L".join(point(e, m) for e, m in zip(curve.epochs, curve.mean, strict=True))
    band = ""
    if not math.isnan(curve.std[0]) and len(curve.epochs) > 1:
        rows = list(zip(curve.epochs, curve.mean, curve.std, strict=True))
        edge = [point(e, m + s) for e, m, s in rows] + [point(e, m - s) for e, m, s in reversed(rows)]
        band = f"<path class=band d='M{'L'.join(edge)}Z'/>"
    dots = f"<path class=dots d='M{mean.replace('L', 'h0M')}h0'/>" if len(curve.epochs) <= _DOTTED else ""
    drawn = Markup(f"{band}<path class=mean d='M{mean}'/>{dots}")  # of numbers alone
    return fill("<g class='line {style}' data-row={number}>{drawn}</g>", style=style, number=number, drawn=drawn)


def _across(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _down(share: float) -> float:
    share = min(max(share, -1.0), 2.0)  # far outside of the clip, but not at infinity
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _grid(x: _Axis, y: _Axis) -> Iterator[Markup]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for value, text in x.ticks:
        at = _across(x.place(value))
        yield Markup(f"<path class=grid d='M{at:.1f} {_TOP}V{bottom}'/>")
        yield fill(f"<text class=tick x={at:.1f} y={bottom + 15} text-anchor=middle>{{text}}</text>", text=text)
    for value, text in y.ticks:
        at = _down(y.place(value))
        yield Markup(f"<path class=grid d='M{_LEFT} {at:.1f}H{right}'/>")
        yield fill(f"<text class=tick x={_LEFT - 6} y={at + 4:.1f} text-anchor=end>{{text}}</text>", text=text)


# -- axes ---------------------------------------------------------------------------------------------------------

_LOG_FROM = 40  # epochs from which their axis is logarithmic


def _epoch_axis(first: int, last: int) -> _Axis:
    last = max(last, first + 1)
    if last >= _LOG_FROM:
        low, high = math.log(first), math.log(last)
        ticks = [b * 10**e for e in range(7) for b in (1, 3) if first <= b * 10**e <= last]
        return _Axis(lambda v: (math.log(v) - low) / (high - low), [(t, f"{t}") for t in ticks])
    step = max(1, math.ceil((last - first) / 8))
    return _Axis(lambda v: (v - first) / (last - first), [(t, f"{t}") for t in range(first, last + 1, step)])


def _nll_axis(values: Sequence[float]) -> _Axis:
    """A logarithmic axis with a margin, its ticks at 1, 2, 5 and so on."""
    low, high = min(values), min(max(values), _HIGHEST_NLL)
    low, high = math.log(max(low, 1e-9) / 1.08), math.log(max(high, low * 1.01, 1e-9) * 1.08)
    dense: Sequence[float] = (
        (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
        if high - low < 1.5
        else (1, 1.5, 2, 3, 5, 7)
        if high - low < 3
        else (1, 2, 5)
        if high - low < 6
        else (1,)
    )
    if high - low < 1:
        dense = [i / 10 for i in range(10, 100, 1 if high - low < 0.2 else 2)]
    ticks = [round(d * 10.0**e, 12) for e in range(-9, 2) for d in dense]
    return _spaced(lambda v: (math.log(max(v, 1e-9)) - low) / (high - low), ticks, lambda t: f"{t:g}")


def _accuracy_axis(values: Sequence[float]) -> _Axis:
    """Logarithm of the error, labelled with accuracies."""

    def place(value: float) -> float:
        return -math.log(max(1 - value, _LEAST_ERROR))

    low, high = place(min(values)) - 0.05, place(max(values)) + 0.08
    fine = [i / 1000 for i in range(0, 900, 100)] + [i / 1000 for i in range(900, 1000, 10)]
    fine += [0.85, 0.905, 0.915, 0.925, 0.975, 0.985, 0.995, 0.997, 0.998, 0.999, 0.9995, 0.9999]
    return _spaced(lambda v: (place(v) - low) / (high - low), sorted(fine), lambda t: f"{t:g}")


def _spaced(place: Callable[[float], float], ticks: Sequence[float], text: Callable[[float], str]) -> _Axis:
    """An axis with those of the ticks that lie on it and have room for their label, round numbers first."""
    room = 20 / (_HEIGHT - _TOP - _BOTTOM)
    kept: list[float] = []
    for tick in sorted(ticks, key=lambda t: (len(text(t)), t)):
        if 0 <= place(tick) <= 1 and all(abs(place(tick) - place(other)) >= room for other in kept):
            kept.append(tick)
    return _Axis(place, [(tick, text(tick)) for tick in sorted(kept)])
