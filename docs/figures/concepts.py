"""Draws docs/figures/jet.svg and docs/figures/forward-gradient.svg: ``python docs/figures/concepts.py``."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
BLUE, RED, GREEN, GREY = "#1b6ca8", "#c8553d", "#2a9d5c", "#777777"


def text(x: float, y: float, words: str, colour: str = "#222222", size: int = 14, anchor: str = "middle") -> str:
    """Words, with y at their base line."""
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A rectangle with round corners, filled lightly."""
    place = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="4"'
    return f'<rect {place} fill="{colour}" fill-opacity="0.15" stroke="{colour}"/>'


def arrow(x: float, y: float, to_x: float, to_y: float, colour: str = GREY, dashes: str = "none") -> str:
    """A line with a head."""
    place = f'x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}"'
    return f'<line {place} stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dashes}" marker-end="url(#head)"/>'


def svg(width: int, height: int, parts: list[str]) -> str:
    """A picture on white, so that it can be read on a dark page, too."""
    head = '<marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
    head += '<path d="M0,0 L8,4 L0,8 z" fill="#777777"/></marker>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">\n'
        f'<defs>{head}</defs><rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def jet() -> str:
    """Three values of a program, each with its rows, for K = 2."""
    parts = []
    rows = [("value", BLUE), ("slope 1", GREEN), ("slope 2", GREEN), ("1,1", RED), ("1,2", RED), ("2,2", RED)]
    carried = (("parameters", 3), ("layer 1: W x", 3), ("layer 2", 6), ("loss", 6))
    for column, (name, count) in enumerate(carried):
        x = 30 + 180 * column
        parts.append(text(x + 55, 26, name))
        for number, (label, colour) in enumerate(rows[:count]):
            parts += [box(x, 38 + 30 * number, 110, 24, colour), text(x + 55, 55 + 30 * number, label, size=12)]
        if column:
            parts.append(arrow(x - 62, 80, x - 8, 80))
    parts.append(
        text(
            30,
            246,
            "Rows of zeros are not carried: parameters, and a linear first layer, have none of second order.",
            GREY,
            13,
            "start",
        )
    )
    return svg(740, 262, parts)


def forward_gradient() -> str:
    """One layer in the two passes."""
    parts = [
        text(20, 26, "First pass: noise u enters behind each layer, and reaches the sample's loss", BLUE, 14, "start")
    ]
    parts += [
        text(
            20,
            138,
            "Second pass: the same u times that number, and the layer's own vector-Jacobian product",
            RED,
            14,
            "start",
        )
    ]
    for y, colour in ((44, BLUE), (156, RED)):
        for x, words in ((20, "x"), (180, "layer W"), (400, "the rest"), (590, "loss")):
            parts += [box(x, y, 110, 44, colour), text(x + 55, y + 27, words)]
        for x, to in ((130, 180), (290, 400), (510, 590)):
            parts.append(arrow(x + 2, y + 22, to - 3, y + 22))
    parts += [text(345, 60, "+ u", GREEN, 16), text(645, 108, "s = dL . u", GREEN, 14)]
    parts += [text(345, 172, "s u", GREEN, 16), text(235, 224, "dL/dW ~ (s u) x^T", GREEN, 14)]
    return svg(740, 240, parts)


if __name__ == "__main__":
    (HERE / "jet.svg").write_text(jet())
    (HERE / "forward-gradient.svg").write_text(forward_gradient())
