"""HTML whose every value is escaped: the one door through which text comes onto a page.

Values are untrusted: a run's folder may come from anyone. A template is written in this package; what it is filled with
is escaped unless it is :class:`Markup` already: text that this package wrote, or that has passed here. Attributes that
a text goes into are quoted in the template.
"""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Iterable

__all__ = ["Markup", "anchor", "fill", "join", "plain"]


class Markup(str):
    """Text that is HTML."""

    __slots__ = ()


def fill(template: str, /, **values: object) -> Markup:
    """The template with its ``{names}`` replaced by values.

    >>> fill("<a href='#{key}'>{title}</a>", key="x'y", title=fill("<b>{n}</b>", n="<&>"))
    "<a href='#x&#x27;y'><b>&lt;&amp;&gt;</b></a>"
    """
    return Markup(template.format_map({name: _escaped(value) for name, value in values.items()}))


def join(parts: Iterable[object], between: str = "") -> Markup:
    """Parts one after another, each escaped unless it is markup."""
    return Markup(between.join(_escaped(part) for part in parts))


def plain(text: str) -> str:
    """Text that every encoding can write: halves of surrogate pairs, which JSON may hold, are replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


def anchor(*parts: object) -> str:
    """A name for ids and links, of letters, digits and hyphens; different parts have different names.

    >>> anchor("cnn", "mnist", 5000)
    'cnn-mnist-5000'
    """
    whole = "-".join(map(str, parts))
    safe = re.sub(r"[^A-Za-z0-9-]", "", whole)
    return safe if safe == whole else f"{safe}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:8]}"


def _escaped(value: object) -> str:
    return value if isinstance(value, Markup) else html.escape(plain(str(value)), quote=True)
