"""The report: runs read from disk, gathered into the paper's rows, and written as a page, Markdown or thin JSON."""

from .document import Chapter, page
from .export import export
from .groups import method_label, sections, slug
from .runs import RunRecord, read, thin
from .tables import Cell, Column, Table
from .text import markdown

__all__ = [
    "Cell",
    "Chapter",
    "Column",
    "RunRecord",
    "Table",
    "export",
    "markdown",
    "method_label",
    "page",
    "read",
    "sections",
    "slug",
    "thin",
]
