"""The code blocks of the documents run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jetplane.ad import rules
from jetplane.ad.algebra import registry

ROOT = Path(__file__).parents[1]
PAGES = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))
BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name in ("README.md", "CONTRIBUTING.md", *PAGES)
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL))
    if not name.startswith("docs") or re.search(r"^(import|from) ", block, re.MULTILINE)  # the others are fragments
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_block_runs(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in re.findall(r"^from (transformers|lightning|accelerate)", block, re.MULTILINE):
        pytest.importorskip(package, reason=f"{package} is not installed")
    rules.load()
    monkeypatch.setattr(registry, "_TABLE", registry.registered())  # what a block registers goes with it
    exec(compile(block, "<document>", "exec"), {})
    registry.plan.cache_clear()


def test_each_of_the_five_tasks_takes_ten_lines_at_most() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "five-tasks.md").read_text(), re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        yours, added = block.split("# ---\n")
        lines = [line for line in added.splitlines() if line.strip()]
        assert yours.strip() and 3 <= len(lines) <= 10 and "import jetplane as jp" in lines


def test_links_between_documents_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *PAGES):
        text = (ROOT / name).read_text()
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert ((ROOT / name).parent / target).exists(), f"{name} links to {target}"


def test_the_readme_is_short_and_its_figure_small() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
    for figure in re.findall(r"!\[[^]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        assert 1_000 < (ROOT / figure).stat().st_size < 100_000


HOMES = ("", "src/jetplane", "src/jetplane/ad", "lab/src", "lab/src/jetplane_lab")


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/design.md"])
def test_paths_in_documents_are_there(name: str) -> None:
    paths = re.findall(r"`([\w/.]+(?:\.(?:py|toml|md|txt)|/))`", (ROOT / name).read_text())
    assert len(paths) > 20
    missing = [path for path in paths if not any((ROOT / home / path).exists() for home in HOMES)]
    assert not missing, f"{name} names {missing}; expected paths of this repository."
