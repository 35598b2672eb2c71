"""The code blocks of the documents run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jetplane.ad import registry, rules

ROOT = Path(__file__).parents[1]
BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name in ("README.md", "CONTRIBUTING.md")
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_block_runs(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rules.load()
    monkeypatch.setattr(registry, "_TABLE", registry.registered())  # what a block registers goes with it
    exec(compile(block, "<document>", "exec"), {})
    registry.plan.cache_clear()


def test_links_between_documents_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/design.md"):
        text = (ROOT / name).read_text()
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert ((ROOT / name).parent / target).exists(), f"{name} links to {target}"
