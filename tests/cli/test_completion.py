"""Completion: what the shells themselves make of the scripts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from jetplane import cli
from jetplane.cli import entries
from jetplane.cli.completion import SHELLS, script


def completed(words: list[str], folder: Path) -> list[str]:
    """What bash offers for the last of these words."""
    (folder / "script").write_text(script(cli.parser(entries.registered()), "bash"))
    asked = f"source ./script; COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}"
    command = f'{asked}; _jetplane; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    assert completed(["jetplane", "re"], tmp_path) == ["reproduce", "report", "replay"]
    assert completed(["jetplane", "--ver"], tmp_path) == ["--version"]
    assert completed(["jetplane", "train", "--epo"], tmp_path) == ["--epochs"]
    assert completed(["jetplane", "--debug", "completion", "f"], tmp_path) == ["fish"]
    assert completed(["jetplane", "report", "runs", "--ma"], tmp_path) == ["--markdown"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_scripts_are_those_of_their_shell(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "jetplane" in text and "epochs" in text and "SUPPRESS" not in text and "%(default)" not in text
    if shutil.which(shell) is not None:
        (tmp_path / "script").write_text(text)
        subprocess.run([shell, "-n", "script"], cwd=tmp_path, check=True)


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish")
def test_fish_completes(tmp_path: Path) -> None:
    (tmp_path / "script.fish").write_text(script(cli.parser(entries.registered()), "fish"))
    asked = "source ./script.fish; complete -C 'jetplane train --epo'; complete -C 'jetplane completion z'"
    done = subprocess.run(
        ["fish", "-c", asked], cwd=tmp_path, capture_output=True, text=True, env={"HOME": str(tmp_path), "PATH": "/bin"}
    )
    assert done.stdout.startswith("--epochs") and "zsh" in done.stdout
