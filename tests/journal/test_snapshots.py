"""Snapshots are whole or refused."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch

from jetplane.errors import JetplaneError, JournalDamaged
from jetplane.journal import snapshots
from jetplane.journal.snapshots import Standing
from journaled import same

STATE = Standing("run", 12, 2**32 - 1, 1, float("inf"), (4, -0.5), [0.1], [0.0], {"epoch": 1})
TENSORS = {"b": torch.randn(3, 2, dtype=torch.bfloat16), "a": torch.randn(4, 3).T, "c": torch.tensor(3)}


def test_all_comes_back(tmp_path: Path) -> None:
    shared = torch.randn(6)
    tensors = TENSORS | {"one": shared[:3], "other": shared[2:], "empty": torch.zeros(0, 2)}
    snapshots.write(tmp_path, tensors, STATE)
    assert snapshots.steps_of(tmp_path) == [12]
    state, found = snapshots.standing(snapshots.path_of(tmp_path, 12))
    assert state == STATE and same(found, tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["after-00000012.safetensors"]


def test_steps_are_read_off_whole_files_only(tmp_path: Path) -> None:
    for name in (
        "after-00000030.safetensors",
        "after-3.safetensors.part",
        "other.safetensors",
        "after-123456789.safetensors",
    ):
        (tmp_path / name).touch()
    assert snapshots.steps_of(tmp_path) == [30, 123456789]


def test_what_is_not_whole_is_refused(tmp_path: Path) -> None:
    snapshots.write(tmp_path, TENSORS, STATE)
    path = snapshots.path_of(tmp_path, 12)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(JournalDamaged, match="is damaged: the checksum of its contents is not the one that it holds"):
        snapshots.standing(path)
    path.write_bytes(data[:-1])
    with pytest.raises(JournalDamaged, match=r"00000012.safetensors cannot be read .*incomplete"):
        snapshots.standing(path)
    with pytest.raises(JournalDamaged, match="cannot be read"):
        snapshots.standing(tmp_path / "none")


def test_numbers_beside_the_tensors_are_checked_too(tmp_path: Path) -> None:
    snapshots.write(tmp_path, TENSORS, STATE)
    path = snapshots.path_of(tmp_path, 12)
    data = path.read_bytes()
    assert data.count(b'step\\": 12,') == 1
    path.write_bytes(data.replace(b'step\\": 12,', b'step\\": 13,'))
    with pytest.raises(JournalDamaged, match="is damaged"):
        snapshots.standing(path)


def test_an_export_is_plain_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    snapshots.export(TENSORS, tmp_path / "out.safetensors", 7)
    assert same(load_file(tmp_path / "out.safetensors"), TENSORS)
    assert snapshots.read(tmp_path / "out.safetensors")[1] == {"steps": "7"}


@pytest.mark.parametrize("name", ["numpy", "safetensors"])
def test_packages_that_are_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(module: str, *args: Any, **options: Any) -> Any:
        if module.partition(".")[0] == name:
            raise ImportError(f"No module named {name!r}")
        return imported(module, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    message = rf"need the packages safetensors and numpy \(No module named '{name}'\); install them with pip install "
    with pytest.raises(JetplaneError, match=message):
        snapshots.require()
