"""What lies in a folder, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from jetplane.errors import JournalDamaged, JournalRefused, ReplayDiffers
from jetplane.journal import holds_journal, opened, remove, replay, snapshots, verify
from jetplane.journal.frames import begin, enframed, scan
from jetplane.journal.reader import FILE
from journaled import recorded, same


def reframed(folder: Path, **changes: object) -> None:
    """Another header, in a file that is whole."""
    old = scan((folder / FILE).read_bytes(), folder / FILE)
    data = begin(json.dumps(json.loads(old.header.body) | changes).encode())
    crc = scan(data, folder).header.crc
    for record in old.records:
        frame, crc = enframed(record.body, crc, len(data))
        data += frame
    (folder / FILE).write_bytes(data)


def test_records_and_numbers_of_a_run(tmp_path: Path) -> None:
    assert not holds_journal(tmp_path)
    recorded(tmp_path, steps=7, digest_every=3)
    assert holds_journal(tmp_path)
    journal = opened(tmp_path)
    assert (journal.first, journal.last, journal.frames.torn) == (0, 7, 0)
    assert [record.step for record in journal.records(2, 5)] == [2, 3, 4]
    assert [record.place for record in journal.records(0, 2)] == [{"batch": 0}, {"batch": 1}]
    assert journal.header["K"] == 3
    assert verify(tmp_path) == (7, 2, 0)


def test_every_step_can_be_asked_for(tmp_path: Path) -> None:
    states = recorded(tmp_path, steps=7, snapshot_every=3)
    assert snapshots.steps_of(tmp_path) == [0, 3, 6]
    for step, state in enumerate(states):
        assert same(replay(tmp_path, step), state)
    for step in (-1, 8):
        with pytest.raises(
            JournalRefused, match=f"step is {step}, and the journal in .* goes from 0 to 7; expected a num"
        ):
            replay(tmp_path, step)


def test_only_the_first_snapshot_is_needed(tmp_path: Path) -> None:
    states = recorded(tmp_path, steps=7, snapshot_every=3)
    for step in (3, 6):
        snapshots.path_of(tmp_path, step).unlink()
    assert same(replay(tmp_path), states[7])
    snapshots.path_of(tmp_path, 0).unlink()
    with pytest.raises(
        JournalDamaged, match=r"no snapshot in .* is good: There are none up to step 7. Expected one to be"
    ):
        replay(tmp_path)


def test_a_damaged_snapshot_is_told_of(tmp_path: Path) -> None:
    states = recorded(tmp_path, steps=7, snapshot_every=3)
    snapshots.path_of(tmp_path, 6).write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="00006.safetensors cannot be read .* Going on from the snapshot after step 3"):
        assert same(replay(tmp_path), states[7])
    for step in (0, 3):
        snapshots.path_of(tmp_path, step).write_bytes(b"nothing")
    with pytest.raises(JournalDamaged, match=r"is good: .*00006.safetensors cannot be read.*00000.safetensors cannot"):
        replay(tmp_path)


def test_a_snapshot_of_another_run_or_step_is_not_taken(tmp_path: Path) -> None:
    states = recorded(tmp_path / "a", steps=4, snapshot_every=3)
    recorded(tmp_path / "b", "groups", steps=4, snapshot_every=3)
    for source in (tmp_path / "b" / "after-00000003.safetensors", tmp_path / "a" / "after-00000000.safetensors"):
        shutil.copy(source, tmp_path / "a" / "after-00000003.safetensors")
        with pytest.warns(UserWarning, match="is no snapshot of this journal's step 3"):
            assert same(replay(tmp_path / "a"), states[4])


def test_a_run_that_leads_elsewhere_than_its_snapshot(tmp_path: Path) -> None:
    recorded(tmp_path, steps=4, snapshot_every=3)
    path = snapshots.path_of(tmp_path, 3)
    state, tensors = snapshots.standing(path)
    tensors["parameter 1"][0] = 0.0
    snapshots.write(tmp_path, tensors, state)
    with pytest.raises(
        ReplayDiffers, match=r"00003.safetensors has other numbers for parameter 1 than the replay of 3 st"
    ):
        verify(tmp_path)


def test_removing_a_journal_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    recorded(tmp_path, steps=4, snapshot_every=2)
    (tmp_path / "mine").touch()
    remove(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    remove(tmp_path / "none")


def test_a_folder_without_a_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalRefused, match=f"holds no journal; expected a folder with a file {FILE}"):
        opened(tmp_path)


def test_other_versions_and_forms_are_refused(tmp_path: Path) -> None:
    recorded(tmp_path, steps=2)
    reframed(tmp_path, jetplane="0.0.1", update="form 0 on cpu")
    message = r"jetplane is '0\.0\.1' there and '.*' here; update is 'form 0 on cpu' there and 'form 1 on cpu' here\."
    with pytest.raises(JournalRefused, match=message):
        replay(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_run_on_a_device_that_is_not_here(tmp_path: Path) -> None:
    recorded(tmp_path, steps=2)
    reframed(tmp_path, update="form 2 on cuda")
    with pytest.raises(JournalRefused, match=r"the run of .* was on cuda, and torch sees no such device here"):
        replay(tmp_path)
    with pytest.raises(JournalRefused, match="update is 'form 2 on cuda' there and 'form 1 on cpu' here"):
        opened(tmp_path).replica(0, torch.device("cpu"))
