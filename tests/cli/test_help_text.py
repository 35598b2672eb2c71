"""Help at 80 columns."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from jetplane import cli
from jetplane.cli import entries
from jetplane.cli.help_text import Wrapped


@pytest.mark.parametrize("columns", [70, 80, 200])
def test_the_help_of_every_command_fits(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    found = entries.registered()
    top = cli.parser(found)
    (commands,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    assert set(commands.choices) == set(found.commands)
    for parser in (top, *commands.choices.values()):
        longest = max(parser.format_help().splitlines(), key=len)
        assert len(longest) <= columns, longest


def test_columns_and_paragraphs_stay_apart() -> None:
    text = (
        "A sentence of some words\nthat goes on:\n  one    the first\n  a-long-name-of-a-thing    the second\nAnd more."
    )
    lines = Wrapped("x")._fill_text(text, 32, "").splitlines()
    assert lines == [
        *("A sentence of some words that", "goes on:", "  one    the first", "  a-long-name-of-a-thing"),
        *("      the second", "And more."),
    ]


def test_many_choices_are_listed_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    parser = argparse.ArgumentParser(formatter_class=Wrapped)
    parser.add_argument("--which", choices=[f"name-{n}" for n in range(9)], help="what to take")
    parser.add_argument("--few", choices=["a", "b"], help="of two")
    text = " ".join(parser.format_help().split())
    assert "--which WHICH" in text and "what to take: name-0, name-1" in text and "--few {a,b} of two" in text


def test_an_error_is_red_in_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert cli.main(["report", "/nowhere"]) == 1
    assert capsys.readouterr().err.startswith("jetplane: there is no /nowhere")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(["report", "/nowhere"]) == 1
    assert capsys.readouterr().err.startswith("\033[31mjetplane:\033[0m there is no")
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["report", "/nowhere"]) == 1
    assert "\033" not in capsys.readouterr().err


@pytest.mark.slow
def test_the_package_is_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "jetplane"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: jetplane") and "completion" in done.stdout
