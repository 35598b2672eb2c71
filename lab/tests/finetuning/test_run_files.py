"""A record is whole or not there, is never written over by another, and a checkpoint goes with its run."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_texts
from jetplane_lab.finetuning.entry import Entry
from jetplane_lab.finetuning.run_files import RunFiles, finite, read

ENTRY = Entry("adamw", "all", 1e-3, 0, True, tiny_texts.SETTINGS)
RECORD: dict[str, Any] = {"entry": dataclasses.asdict(ENTRY), "curve": [], "environment": {}}


def at(folder: Path, entry: Entry = ENTRY, said: list[str] | None = None) -> RunFiles:
    return RunFiles(entry, folder, (said if said is not None else []).append)


def test_numbers_that_are_not_finite_are_null() -> None:
    assert finite(0.5) == 0.5 and finite(math.nan) is None and finite(math.inf) is None


def test_a_record_is_found_again(tmp_path: Path) -> None:
    files = at(tmp_path / "new")
    assert files.record() is None
    files.write(RECORD)
    assert files.record() == RECORD == read(files.path)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["all-adamw-0.001-seed-0.json"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"entry": {', b"\xff"])
def test_a_damaged_record_is_said_and_made_again(content: bytes, tmp_path: Path) -> None:
    said: list[str] = []
    files = at(tmp_path, said=said)
    files.path.write_bytes(content)
    assert files.record() is None and read(files.path) is None
    assert said == [f"{files.path} is damaged; the run is made again"]


def test_a_record_of_other_settings_is_not_written_over(tmp_path: Path) -> None:
    at(tmp_path).write(RECORD)
    other = dataclasses.replace(ENTRY, settings=dataclasses.replace(ENTRY.settings, epochs=7))
    with pytest.raises(ValueError, match=r"is a run with epochs 1, and this is one with 7; expected another --out"):
        at(tmp_path, other).record()
    assert json.loads(at(tmp_path).path.read_text()) == RECORD


def test_a_checkpoint_is_loaded_and_goes_with_the_record(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    files = at(tmp_path)
    assert files.load() is None
    files.save(
        3, {"w": torch.ones(2)}, {"state": {0: torch.zeros(1)}}, {"seconds": 1.5, "drawn": torch.get_rng_state()}
    )
    found = files.load()
    assert found is not None and found.epoch == 3 and found.model["w"].tolist() == [1, 1]
    assert found.optimizer["state"][0].tolist() == [0] and found.progress["seconds"] == 1.5
    files.write(RECORD)
    assert not files.unfinished.exists() and files.load() is None


def test_a_checkpoint_that_is_damaged_or_anothers_is_said(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    said: list[str] = []
    at(tmp_path).save(3, {}, {}, {})
    other = dataclasses.replace(ENTRY, settings=dataclasses.replace(ENTRY.settings, epochs=7))
    assert at(tmp_path, other, said).load() is None
    assert said.pop().endswith("is a checkpoint of other settings; the run begins anew")
    path = at(tmp_path).unfinished
    path.write_bytes(path.read_bytes()[:-1])
    assert at(tmp_path, said=said).load() is None
    assert said.pop().endswith("; the run begins anew")
