"""Files that others read: the citation, the workflow, the forms for issues, the note on security."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import jetplane

ROOT = Path(__file__).parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_the_citation_names_this_version_and_the_paper() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0" and cited["version"] == jetplane.__version__ and cited["message"]
    paper = cited["preferred-citation"]
    assert paper["title"] in (ROOT / "README.md").read_text()
    names = re.search(r"author  = \{(.*)\}", (ROOT / "README.md").read_text())
    assert names is not None and names[1].count(" and ") + 1 == len(paper["authors"])


def test_the_workflow_runs_what_a_merge_needs_on_every_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())
    job = workflow["jobs"]["checks"]
    assert job["steps"][-1] == {"run": ".ci/run"} and (ROOT / ".ci" / "run").exists()
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"] and least == ">=3.11"
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in (ROOT / ".github" / "workflows" / "checks.yml").read_text()
    assert re.search(r"^docs:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert workflow["jobs"]["docs"]["steps"][-1] == {"run": "make docs"}


@pytest.mark.parametrize("form", [form for form in FORMS if form.stem != "config"], ids=lambda form: form.stem)
def test_forms_ask_for_something(form: Path) -> None:
    asked = yaml.safe_load(form.read_text())
    assert asked["name"] and asked["description"]
    fields = [field for field in asked["body"] if field["type"] in ("input", "textarea")]
    assert len({field["id"] for field in fields}) == len(asked["body"])
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_the_note_on_security_names_files_that_are_there() -> None:
    paths = re.findall(r"`([\w/]+\.py)`", (ROOT / "SECURITY.md").read_text())
    assert paths and all((ROOT / path).exists() for path in paths)


def test_nothing_is_unpickled_but_by_the_reader_of_arrays() -> None:
    """What SECURITY.md says."""
    sources = [path for folder in ("src", "lab/src") for path in (ROOT / folder).rglob("*.py")]
    found = {
        path.name
        for path in sources
        if re.search(r"^import pickle|^from pickle|torch\.load\(|\.Unpickler\(", path.read_text(), re.M)
    }
    assert found == {"wheel.py"}
