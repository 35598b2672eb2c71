"""The site names every public name, and its tools are pinned; ``make docs`` builds it and is strict about links."""

from __future__ import annotations

import importlib.util
import inspect
import re
import runpy
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import jetplane
from jetplane import curvature, directions, journal, optim, parallel, solvers

ROOT = Path(__file__).parents[1]
API = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
ROOMS = (jetplane, curvature, directions, journal, optim, parallel, solvers)
NAMES = [
    pytest.param(room, name, id=f"{room.__name__}.{name}")
    for room in ROOMS
    for name in room.__all__
    if not isinstance(getattr(room, name), ModuleType)
]


@pytest.mark.parametrize(("room", "name"), NAMES)
def test_every_public_name_is_in_the_reference(room: ModuleType, name: str) -> None:
    here, above = f"{room.__name__}.{name}", f"jetplane.{name}"
    assert re.search(
        rf"^::: ({re.escape(here)}|{re.escape(above)})$|`{re.escape(here)}`|`jp\.{name}`", API, re.MULTILINE
    )


@pytest.mark.parametrize(("room", "name"), NAMES)
def test_every_public_name_has_a_docstring_of_its_own(room: ModuleType, name: str) -> None:
    value = getattr(room, name)
    if name in ("Memory", "Size"):  # aliases of types, which have none: the page has a sentence
        assert re.search(rf"`jetplane\.directions\.{name}` is\s", API)
        return
    said = inspect.getdoc(value) or ""
    assert len(said) >= 20 and not said.startswith(f"{name}(")  # not the one that dataclasses make


def has_packages(module: str) -> bool:
    """Whether what a trainer's module needs is installed."""
    trainers = {"accelerate", "lightning", "transformers"}
    return all(map(importlib.util.find_spec, {"accelerate", module.split(".")[-1]} & trainers))


def test_what_the_reference_names_is_there() -> None:
    for path in re.findall(r"^::: (\S+)$", API, re.MULTILINE):
        module, _, name = path.rpartition(".")
        if not has_packages(module):
            continue
        assert hasattr(__import__(module, fromlist=[name]), name), path


def test_the_drawings_are_those_of_their_script() -> None:
    figures = ROOT / "docs" / "figures"
    script = runpy.run_path(str(figures / "concepts.py"))
    assert (figures / "jet.svg").read_text() == script["jet"]()
    assert (figures / "forward-gradient.svg").read_text() == script["forward_gradient"]()


def test_the_tools_are_pinned() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    pinned = (ROOT / "constraints.txt").read_text()
    for one in (*wanted, "mkdocstrings-python"):
        assert re.search(rf"^{re.escape(one.split('[')[0])}==", pinned, re.MULTILINE), one


def test_every_page_is_in_the_navigation() -> None:
    shown = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 25 and [page for page in pages if f": {page}" not in shown] == []
