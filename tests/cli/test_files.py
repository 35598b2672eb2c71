"""Files are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetplane.cli import files


def test_folders_are_made_and_contents_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "text.md"
    for text in ("one\n", "zwölf\n"):
        files.write(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert path.stat().st_mode & 0o777 == 0o644
    assert [one.name for one in path.parent.iterdir()] == ["text.md"]


def test_a_failure_leaves_the_old_contents_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.md"
    files.write(path, "old")

    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        files.write(path, "new")
    assert path.read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["text.md"]
