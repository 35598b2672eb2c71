"""Two commits beside each other: which are found, what is slower, and one real round."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from jetplane import cli
from jetplane_lab.bench import two_commits

ROOT = Path(__file__).parents[3]


def has_git() -> bool:
    asked = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, check=False)
    return asked.returncode == 0


def test_slower_is_what_is_above_the_limit() -> None:
    found = {"rows": {"a": {"ratio": 1.2}, "b": {"ratio": 1.05}, "c": {"ratio": 0.5}}}
    assert two_commits.slower(found, 1.1) == ["a"] and two_commits.slower(found, 1.0) == ["a", "b"]


@pytest.mark.skipif(not has_git(), reason="this is no checkout")
def test_commits_are_checked_out_and_taken_away_again() -> None:
    with two_commits.trees_of(ROOT, ("HEAD", ".")) as trees:
        assert trees["new"] == ROOT / "src" and trees["old"] != trees["new"]
        assert (trees["old"] / "jetplane" / "__init__.py").exists()
    assert not trees["old"].exists()
    listed = subprocess.run(["git", "-C", str(ROOT), "worktree", "list"], capture_output=True, text=True, check=True)
    assert str(trees["old"].parent) not in listed.stdout
    with pytest.raises(ValueError, match="--compare has no-such, which is no commit here; expected a name"):  # noqa: SIM117
        with two_commits.trees_of(ROOT, ("no-such", ".")):
            pass


def test_a_folder_without_the_package_or_a_repository_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="holds no package jetplane; expected a commit"):  # noqa: SIM117
        with two_commits.trees_of(tmp_path, (".", ".")):
            pass
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "--compare", ".", "."]) == 2
    assert "--compare needs a checkout of the repository" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not has_git(), reason="this is no checkout")
def test_the_same_files_twice_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    options = ["--rounds", "1", "--seconds", "0.2", "--slower", "100", "--out", str(tmp_path)]
    assert cli.main(["bench", "--compare", ".", ".", *options]) == 0
    found = json.loads((tmp_path / "compare.json").read_text())
    assert len(found["rows"]) == 4 and all(row["ratio"] > 0 for row in found["rows"].values())
