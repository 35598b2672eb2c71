"""The commands that are there, and those that are not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import types
from typing import Any

import pytest
import torch

import jetplane
from jetplane import cli
from jetplane.cli import entries

STUDY = ("demo", "train", "tune", "reproduce", "report", "data", "rosenbrock", "bench")


SENTENCE = (
    "the command train is missing, because it belongs to the study in lab/ of the repository, which is not installed; "
    "pip install ./lab in a checkout installs it."
)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The study neither installed nor on the path."""
    entry_points, find_spec = importlib.metadata.entry_points, importlib.util.find_spec

    def library_only(**selected: Any) -> list[importlib.metadata.EntryPoint]:
        return [point for point in entry_points(**selected) if not point.value.startswith("jetplane_lab")]

    def outside_the_study(name: str, package: str | None = None) -> Any:
        return None if name.startswith("jetplane_lab") else find_spec(name, package)

    monkeypatch.setattr(entries.importlib.metadata, "entry_points", library_only)
    monkeypatch.setattr(entries.importlib.util, "find_spec", outside_the_study)


def only(monkeypatch: pytest.MonkeyPatch, *points: importlib.metadata.EntryPoint) -> None:
    """No other commands are registered; what other packages have registered is left to them."""
    entry_points = importlib.metadata.entry_points

    def chosen(**selected: Any) -> Any:
        return list(points) if selected.get("group") == entries.GROUP else entry_points(**selected)

    monkeypatch.setattr(entries.importlib.metadata, "entry_points", chosen)


@pytest.mark.parametrize("before", [[], ["--debug"]])
@pytest.mark.usefixtures("alone")
def test_a_command_of_the_study_says_what_is_missing(before: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*before, "train", "--preset", "quick"]) == 2
    assert capsys.readouterr().err == f"jetplane: {SENTENCE}\n"


@pytest.mark.usefixtures("alone")
def test_help_lists_what_is_there_and_names_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    there, _, missing = capsys.readouterr().out.partition("missing: ")
    assert "coverage" in there and "train" not in there
    assert missing.startswith(", ".join(STUDY))


@pytest.mark.parametrize("given", [[], ["--debug"]])
def test_alone_it_shows_the_help(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(given) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("usage: jetplane [-h] [-V]") and "coverage" in shown.out and not shown.err


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_versions(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([option])
    assert capsys.readouterr().out == f"jetplane {jetplane.__version__} (torch {torch.__version__})\n"


def test_a_command_that_cannot_be_imported_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = importlib.metadata.EntryPoint("train", "jetplane_gone.train", entries.GROUP)
    only(monkeypatch, point)
    assert cli.main(["train"]) == 2
    expected = "the command train is missing, because jetplane_gone.train cannot be imported: No module named"
    assert expected in capsys.readouterr().err
    assert "coverage" in entries.registered().commands


def test_without_metadata_what_is_on_the_path_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be installed."""
    only(monkeypatch)
    names = entries.registered()
    assert set(names.commands) == {"completion", "coverage", "journal", "replay", *STUDY}
    assert not names.missing


def test_a_command_without_a_parser_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("other_package.hello")
    module.add_parser = lambda commands: None  # type: ignore[attr-defined]
    monkeypatch.setattr(cli, "registered", lambda: entries.Registered({"hello": module}, {}))
    with pytest.raises(TypeError, match=r"^other_package.hello.add_parser returned None; expected the parser that it"):
        cli.main(["hello"])
