"""Files are whole or not there, and a folder has one writer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jetplane.errors import JournalRefused
from jetplane.journal import durable


def test_contents_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for text in ("one", "two"):
        durable.replace(path, lambda place, text=text: place.write_text(text))
        assert path.read_text() == text and path.stat().st_mode & 0o777 == 0o644
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def test_a_failure_leaves_the_old_contents_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def fail(place: Path) -> None:
        place.write_text("half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        durable.replace(path, fail)
    assert path.read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["a"]


def test_what_a_kill_has_left_is_removed(tmp_path: Path) -> None:
    unfinished = tmp_path / ".unfinished-abc"
    unfinished.mkdir()
    (unfinished / ".tmp123").touch()
    durable.tidy(tmp_path)
    durable.tidy(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_removing_what_may_not_be_there(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    durable.remove([tmp_path / "a", tmp_path / "b"])
    assert list(tmp_path.iterdir()) == []


def test_a_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(JournalRefused, match=r"needs file locks .*and this system has none"), durable.locked(tmp_path):
        pass


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(JournalRefused, match="is being written already; expected one writer at a time")
    with durable.locked(tmp_path), refused, durable.locked(tmp_path):
        pass
    with durable.locked(tmp_path):
        pass
