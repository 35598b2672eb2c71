"""Help that fits the terminal: paragraphs and columns are wrapped at its width, and long choices are listed below."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Iterator

__all__ = ["Wrapped"]

_LONGEST = 30  # of choices in the place of a value, in letters; of a list of values half


class Wrapped(argparse.HelpFormatter):
    """Lines that begin with spaces stay lines of their own, with their columns; the others are joined to paragraphs.

    Example:
        >>> text = "One sentence that is long,\\nand goes on.\\n\\nexamples:\\n  jetplane demo    what it does, all"
        >>> print(Wrapped("jetplane")._fill_text(text, 30, ""))
        One sentence that is long, and
        goes on.
        <BLANKLINE>
        examples:
          jetplane demo
              what it does, all
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(line for part in _parts(text) for line in _wrapped(part, width))

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if action.metavar is None and _long(action):
            name = action.dest.upper() if action.option_strings else action.dest
            return lambda size: (name,) * size
        return super()._metavar_formatter(action, default_metavar)

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        if action.metavar is None and _long(action):
            return f"{text}: {', '.join(map(str, action.choices or ()))}"
        return text


def _long(action: argparse.Action) -> bool:
    choices = action.choices
    if choices is None or action.nargs == argparse.PARSER:
        return False
    return len(",".join(map(str, choices))) > (_LONGEST / 2 if action.nargs in ("+", "*") else _LONGEST)


def _parts(text: str) -> Iterator[str]:
    """Paragraphs in one line each, empty lines, and lines that begin with spaces."""
    paragraph: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.strip() and not line.startswith(" ") and not line.rstrip().endswith(":"):
            paragraph.append(line.strip())
            continue
        heading = line.strip() and not line.startswith(" ")
        if heading:  # ends with a colon, and belongs to the paragraph that it is part of
            paragraph.append(line.strip())
        if paragraph:
            yield " ".join(paragraph)
            paragraph = []
        if not heading:
            yield line.rstrip()


def _wrapped(part: str, width: int) -> list[str]:
    columns = re.match(r"\s+\S.*?\s{2,}(?=\S)", part)
    start = len(columns[0]) if columns else 0
    if not 0 < start <= width // 2:
        start = len(part) - len(part.lstrip()) + (4 if part.startswith(" ") else 0)
    if columns and len(columns[0]) > width // 2:  # a long first column has its words on the next line
        first, second = columns[0].rstrip(), part[len(columns[0]) :]
        return [*_filled(first, width, start), *_filled(" " * start + second, width, start)]
    return _filled(part, width, start) or [""]


def _filled(line: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
