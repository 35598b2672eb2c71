"""A run of the study with a journal: any step of it can be rebuilt, and it goes on with its checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from jetplane import journal
from jetplane.errors import JournalRefused, ReplayDiffers
from jetplane_lab.training import Trainer
from jetplane_lab.training.folder import Folder
from tiny import advance, assert_same, config, dataset, trainer


def journaled(folder: Path | None, **changes: Any) -> Trainer:
    return Trainer(config(**changes), dataset(), folder, checkpoint_seconds=0.0, journal=True)


@pytest.mark.parametrize("method", ["fomoh-kd", "gauss-newton"])
def test_every_step_is_written_down(method: str, tmp_path: Path) -> None:
    plain, run = trainer(method=method, schedule="cosine"), journaled(tmp_path, method=method, schedule="cosine")
    plain.fit()
    run.fit()
    assert_same(run, plain)
    found = journal.opened(tmp_path / "journal")
    assert found.last == 12  # four epochs of three batches
    assert [one.place for one in found.records(2, 5)] == [
        {"epoch": 0, "batch": 2},
        {"epoch": 1, "batch": 0},
        {"epoch": 1, "batch": 1},
    ]
    replayed = journal.replay(tmp_path / "journal")
    assert all(torch.equal(replayed[name], value) for name, value in run.model.state_dict().items())
    journal.verify(tmp_path / "journal")


def test_a_run_goes_on_with_its_journal_from_its_checkpoint(tmp_path: Path) -> None:
    plain = trainer(schedule="cosine")
    plain.fit()
    run = journaled(tmp_path, schedule="cosine")
    work = run.work()
    while run.epoch < 2 or len(list(journal.opened(tmp_path / "journal").frames.records)) < 8:
        next(work)
    work.close()  # in the middle of the third epoch
    assert journal.opened(tmp_path / "journal").last == 8
    again = trainer(tmp_path, schedule="cosine")  # it need not be asked for again
    again.fit()
    assert_same(again, plain)
    assert journal.opened(tmp_path / "journal").last == 12
    journal.verify(tmp_path / "journal")


def test_a_journal_may_begin_later(tmp_path: Path) -> None:
    advance(trainer(tmp_path), 2)
    journaled(tmp_path).fit()
    found = journal.opened(tmp_path / "journal")
    assert (found.first, found.last) == (6, 12)


def test_a_journal_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    first = journaled(tmp_path / "a")
    advance(first, 1)
    other = journaled(tmp_path / "b")
    with torch.no_grad():
        next(other.model.parameters()).mul_(2.0)
    advance(other, 1)
    shutil.rmtree(tmp_path / "a" / "journal")
    shutil.copytree(tmp_path / "b" / "journal", tmp_path / "a" / "journal")
    with pytest.raises(
        ReplayDiffers, match="leads to other parameters after 3 steps than the checkpoint holds; move it"
    ):
        trainer(tmp_path / "a").fit()


def test_what_cannot_have_a_journal_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for method, message in (
        ("adam", "the optimizer is Adam, whose"),
        ("fomoh-bp", "the directions are Gradient, and a"),
    ):
        with pytest.raises(JournalRefused, match=message):
            journaled(tmp_path / method, method=method)
    with pytest.raises(
        JournalRefused, match="a journal was asked for and the run has no folder; expected one to write"
    ):
        journaled(None)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_begins_anew_has_no_journal(tmp_path: Path) -> None:
    journaled(tmp_path, epochs=1).fit()
    (tmp_path / "journal" / "mine").touch()
    place = Folder(tmp_path, config(epochs=1), print)
    place.clear()
    place.release()
    assert [one.name for one in (tmp_path / "journal").iterdir()] == ["mine"]
    run = trainer(tmp_path, epochs=1)
    run.fit()
    assert not journal.holds_journal(tmp_path / "journal")
