"""Docstrings as the site's parser wants them: the heading of examples, and roles, which Markdown has none of."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Plain(griffe.Extension):
    """Changes docstrings after they are read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite a docstring."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            text = re.sub(r"^Example::$", "**Example:**", text, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r":(?:func|class|meth|mod):`[~.]?", "`", text)
