"""Makes notebooks with outputs of two examples: ``python docs/site/notebooks.py`` (needs nbclient and ipykernel).

A notebook's cells are the parts of the script, one for each function, then a run of it and its picture.
"""

from __future__ import annotations

import ast
import json
import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUT = ROOT / "examples" / "notebooks"
RUNS = {"fomoh_kd_plane": ["--steps", "30"], "forward_only_cnn": ["--steps", "80"]}


def cells(name: str) -> list[tuple[str, str]]:
    """The kind and the text of each cell: what the example says, its parts, a run, and the picture."""
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.splitlines()
    said = ast.get_docstring(tree) or ""
    parts = [("markdown", f"# {name}.py\n\n{said}")]
    body = [node for node in tree.body[1:] if not isinstance(node, ast.If)]
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    parts.append(("code", "\n".join(lines[imports[0].lineno - 1 : imports[-1].end_lineno])))
    for node in body[len(imports) :]:
        parts.append(("code", "\n".join(lines[node.lineno - 1 : node.end_lineno])))
    parts.append(("code", f"main({json.dumps([*RUNS[name], '--out', 'drawn.svg'])})"))
    parts.append(("code", 'from IPython.display import SVG\n\nSVG("drawn.svg")'))
    return parts


def main() -> None:
    """Run both, and write them with their outputs."""
    import nbclient
    import nbformat

    made = nbformat.v4

    OUT.mkdir(exist_ok=True)
    for name in RUNS:
        kinds = {"markdown": made.new_markdown_cell, "code": made.new_code_cell}
        notebook = made.new_notebook(cells=[kinds[kind](text) for kind, text in cells(name)])
        for number, cell in enumerate(notebook.cells):
            cell["id"] = f"{name}-{number}"  # the same at each run
        with tempfile.TemporaryDirectory() as folder:
            where = {"metadata": {"path": folder}}
            nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
        for cell in notebook.cells:
            cell.get("metadata", {}).pop("execution", None)  # when it was run
        notebook.metadata.pop("language_info", None)
        part = OUT / f"{name}.part"
        nbformat.write(notebook, part)
        os.replace(part, OUT / f"{name}.ipynb")
        print(f"made: examples/notebooks/{name}.ipynb")


if __name__ == "__main__":
    main()
