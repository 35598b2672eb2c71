"""What the site adds to the pages in docs/: the examples, two files of the root, and links that leave docs/.

mkdocs calls these functions; see mkdocs.yml.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# files of the repository that are pages of the site, by their path from its root
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    "examples/README.md": "examples/index.md",
    **{f"examples/{path.name}": f"examples/{path.stem}.md" for path in EXAMPLES.glob("*.py")},
}
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Enter the examples into the navigation."""
    names = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    pages = ["examples/index.md", *({name: f"examples/{name}.md"} for name in names)]
    config["nav"] = [{"Examples": pages} if item == {"Examples": "EXAMPLES"} else item for item in config["nav"]]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Make pages of the examples and of the files in the repository's root."""
    for source, page in PAGES.items():
        if page == "index.md":
            continue
        text = (ROOT / source).read_text(encoding="utf-8")
        if source.endswith(".py"):
            text = example(Path(source).name, text)
        files.append(File.generated(config, page, content=moved(text, posixpath.dirname(source), page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs/ to the site's pages, and name files that are not part of the site."""
    uri = page.file.src_uri
    if page.file.generated_by:
        return markdown
    return moved(markdown, posixpath.join("docs", posixpath.dirname(uri)), uri)


def example(name: str, text: str) -> str:
    """The page of an example: its docstring, and the program."""
    said = ast.get_docstring(ast.parse(text)) or ""
    return f"# {name}\n\n{said}\n\n```sh\npython examples/{name}\n```\n\n```python\n{text}```\n"


def moved(markdown: str, folder: str, page: str) -> str:
    """Links of a document in ``folder`` of the repository, as they are from ``page`` of the site."""

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if not (ROOT / path).exists():
            return match[0]  # mkdocs says what is wrong with it
        if path in PAGES:
            place = PAGES[path]
        elif path.startswith("docs/") and not path.endswith(".py"):
            place = path.removeprefix("docs/")
        else:
            return f"{words} (`{path}`)"
        return f"[{words}]({posixpath.relpath(place, posixpath.dirname(page) or '.')}{anchor})"

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)  # programs stay as they are
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)
