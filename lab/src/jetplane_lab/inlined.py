"""Figures of matplotlib as SVG inside a page: no other file, text as text, the reader's light or dark colours.

A figure is drawn in colours that stand for something (`ROLES`); on a page they become CSS variables, in a file of its
own the colours of light paper. An artist whose gid is ``row-3`` becomes a group of class "line" with ``data-row=3``,
which the page's script can hide.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from .markup import Markup, fill

__all__ = ["COLOURS", "INK", "PAPER", "RULE", "SOFT", "Drawn", "drawn", "settings"]

INK, SOFT, RULE, PAPER = "#000001", "#000002", "#000003", "#000004"
COLOURS = tuple(f"#0001{number:02x}" for number in range(11))  # of the page's --c0 to --c10
_LIGHT: tuple[str, ...] = ("#c98500", "#0072b2", "#009e73", "#d55e00", "#b8578c", "#3a3f45", "#8a929a", "#3aa0e0")
_LIGHT = (*_LIGHT, "#7a5bb5", "#7a5c00", "#0b6e6e")
ROLES: dict[str, tuple[str, str]] = {  # what is drawn: the page's variable, and the colour on light paper
    **{INK: ("ink", "#1f2328"), SOFT: ("soft", "#59636e"), RULE: ("rule", "#d1d9e0"), PAPER: ("paper", "#ffffff")},
    **{colour: (f"c{number}", light) for number, (colour, light) in enumerate(zip(COLOURS, _LIGHT, strict=True))},
}
_numbers = itertools.count()  # so that ids of two figures on one page differ


class Drawn(NamedTuple):
    """A figure as SVG, with the colours that it was drawn in."""

    svg: str
    roles: Mapping[str, tuple[str, str]] = ROLES

    def alone(self) -> str:
        """The text of a file of its own, on light paper."""
        return self._coloured(lambda role: role[1])

    def inline(self, attributes: str = "", **values: object) -> Markup:
        """The element for a page, with further attributes (a template) for its ``svg``."""
        text = self._coloured(lambda role: f"var(--{role[0]})")
        text = re.sub(r"\s*<metadata>.*?</metadata>|\s*<style.*?</style>", "", text[text.index("<svg") :], flags=re.S)
        size = re.search(r'viewBox="([^"]*)"', text)
        assert size is not None
        head = fill(f"<svg viewBox='{size[1]}' role=img {attributes}>", **values)
        text = text[text.index(">", size.end()) + 1 :].replace("xlink:href", "href")
        text = re.sub(r'<g id="row-(\d+)">', r"<g class=line data-row=\1>", text)
        text = re.sub(r'<g id="[^"]*">', "<g>", text)
        key = f"f{next(_numbers)}"
        text = re.sub(r'(\bid="|href="#|url\(#)(?!data:)', rf"\g<1>{key}-", text)
        return Markup(head + _short(text).strip())

    def _coloured(self, shown: Any) -> str:
        known = {colour.lower(): shown(role) for colour, role in self.roles.items()}
        return re.sub("|".join(known), lambda found: known[found[0].lower()], self.svg, flags=re.IGNORECASE)


def _short(text: str) -> str:
    """Without what costs room and shows nothing: digits of places, the names of fonts, line breaks."""

    def tag(found: re.Match[str]) -> str:
        rounded = re.sub(r"\d+\.\d\d+", lambda number: f"{float(number[0]):.1f}", found[0])
        return re.sub(r"font-family: [^;\"]*|(?<=font: )((?:\w+ )?[\d.]+px) [^;\"]*", _font, rounded)

    shown = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"> <", "><", re.sub(r"\s*\n\s*", " ", re.sub(r"<[^>]*>", tag, shown)))


def _font(found: re.Match[str]) -> str:
    size = f"{found[1]} " if found[1] else "font-family: "
    return f"{size}system-ui, sans-serif"


def drawn(figure: Any, roles: Mapping[str, tuple[str, str]] = ROLES) -> Drawn:
    """The figure as SVG."""
    buffer = io.StringIO()
    with settings():  # text stays text
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    return Drawn(buffer.getvalue(), roles)


@contextmanager
def settings(**more: Any) -> Iterator[None]:
    """What figures for a page are drawn with."""
    import matplotlib

    held: dict[Any, Any] = {
        **{"svg.fonttype": "none", "svg.hashsalt": "jetplane", "font.size": 11, "axes.titlesize": 13},
        **{"text.color": INK, "axes.titlecolor": INK, "axes.labelcolor": SOFT, "axes.edgecolor": RULE},
        **{"xtick.color": RULE, "ytick.color": RULE, "xtick.labelcolor": SOFT, "ytick.labelcolor": SOFT},
        **{"axes.grid": True, "grid.color": RULE, "grid.linewidth": 0.7, "axes.axisbelow": True},
        **{"axes.spines.top": False, "axes.spines.right": False, "xtick.minor.size": 0, "ytick.minor.size": 0},
        **{"path.simplify": True, "path.simplify_threshold": 0.2, "lines.solid_capstyle": "round"},
    }
    held.update(more)
    with matplotlib.rc_context(held):
        yield
