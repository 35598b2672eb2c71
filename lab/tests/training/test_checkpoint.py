"""A run's folder: going on bit for bit, damage, full disks, and who may write there."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from jetplane.errors import JetplaneError
from jetplane_lab.training import Callback, Metrics, Trainer, checkpoint, codec, folder
from jetplane_lab.training import durable as files
from jetplane_lab.training.checkpoint import Damaged
from jetplane_lab.training.folder import CHECKPOINT, PREVIOUS, Folder, InUse

CASES: dict[str, dict[str, Any]] = {
    "fgd": {"method": "fgd", "k": 2, "lr": 1e-4},
    "fomoh-kd": {"k": 3, "schedule": "rise", "patience": 1},
    "trust-region": {"solver": "trust-region", "start": 0.01, "schedule": "step", "period": 1, "gamma": 0.7},
    "fomoh-bp": {"method": "fomoh-bp", "schedule": "milestone3", "period": 3},
    "sgd": {"method": "sgd", "momentum": 0.9, "schedule": "cosine"},
    "adam": {"method": "adam", "lr": 1e-3, "weight_decay": 0.1},
}


class Cut(BaseException):
    """Ends a process that cannot be killed: nothing of ours may catch it."""


def warnings_of(path: Path, **changes: Any) -> tuple[Trainer, list[str]]:
    """A run that goes on from a folder, and what it warned of."""
    heard: list[str] = []
    run = Trainer(tiny.config(**changes), tiny.dataset(), path, checkpoint_seconds=0.0, warn=heard.append)
    return run, heard


@pytest.fixture(scope="module")
def whole() -> Trainer:
    """The run that was never stopped."""
    run = tiny.trainer()
    run.fit()
    return run


# -- going on -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_two_epochs_and_two_more_are_four(case: str, tmp_path: Path) -> None:
    expected = tiny.trainer(**CASES[case])
    expected.fit()
    tiny.advance(tiny.trainer(tmp_path, **CASES[case]), 2)
    run = tiny.trainer(tmp_path, **CASES[case])
    assert run.epoch == 2
    run.fit()
    tiny.assert_same(run, expected)
    stored = [Metrics.from_json(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert stored == run.history
    assert run.history[-1].seconds > run.history[1].seconds > 0


def test_a_scheduler_of_ones_own_goes_on_too(tmp_path: Path) -> None:
    def make(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)

    kind = {"method": "sgd", "momentum": 0.9, "schedule": "custom"}
    expected = tiny.trainer(scheduler=make, **kind)
    expected.fit()
    tiny.advance(tiny.trainer(tmp_path, scheduler=make, **kind), 3)
    run = tiny.trainer(tmp_path, scheduler=make, **kind)
    run.fit()
    tiny.assert_same(run, expected)


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = tiny.trainer(tmp_path).fit()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = tiny.trainer(tmp_path).fit()
    assert again == first
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_what_lies_in_the_folder(tmp_path: Path) -> None:
    tiny.trainer(tmp_path).fit()
    names = sorted(path.name for path in tmp_path.iterdir())
    expected = ["config.json", "environment.json", "lock", "metrics.jsonl", "summary.json", CHECKPOINT, PREVIOUS]
    assert names == sorted(expected)
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["torch"] == torch.__version__ and environment["device"] == "cpu"
    assert json.loads((tmp_path / "config.json").read_text())["method"] == "fomoh-kd"


@pytest.mark.parametrize("done", [False, True])
def test_a_kill_at_any_write_loses_nothing(done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flush and rename of a whole run is once the last thing that a process does, or is about to do."""
    kind = {"method": "sgd", "lr": 0.01, "epochs": 3}
    expected = tiny.trainer(**kind)
    expected.fit()
    for limit in range(1000):
        path = tmp_path / str(limit)
        left = limit

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0 and not done:
                    raise Cut
                result = real(*arguments)
                if left < 0:
                    raise Cut
                return result

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", counted(os.replace))
            patch.setattr(os, "fsync", counted(os.fsync))
            try:
                tiny.trainer(path, **kind).fit()
                break  # it was not cut any more
            except Cut:
                pass
        resumed = tiny.trainer(path, **kind)
        resumed.fit()
        tiny.assert_same(resumed, expected)
        assert not list(path.glob("*.part"))
    assert limit > 20


def test_the_metrics_of_epochs_after_the_checkpoint_are_cut(tmp_path: Path, whole: Trainer) -> None:
    tiny.advance(tiny.trainer(tmp_path), 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(whole.history[2].to_json() + '\n{"epoch":4,"lr"')
    run = tiny.trainer(tmp_path)
    run.fit()
    tiny.assert_same(run, whole)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    tiny.advance(tiny.trainer(tmp_path), 1)
    for name in (CHECKPOINT, "config.json", "summary.json"):
        (tmp_path / (name + ".part")).write_bytes(b"half")
    tiny.trainer(tmp_path).close()
    assert not list(tmp_path.glob("*.part"))


# -- another config or environment --------------------------------------------------------------------------------


def test_another_config_is_refused_with_the_field(tmp_path: Path) -> None:
    tiny.advance(tiny.trainer(tmp_path), 1)
    with pytest.raises(ValueError) as caught:
        tiny.trainer(tmp_path, lr=0.5, batch_size=10)
    assert str(caught.value) == (
        f"{tmp_path} holds a run with lr 0.05, but 0.5 was asked for; expected the same, another folder, or --fresh."
    )
    tiny.trainer(tmp_path).close()  # the lock was let go


def test_another_environment_is_named(tmp_path: Path) -> None:
    tiny.advance(tiny.trainer(tmp_path), 1)
    path = tmp_path / "environment.json"
    environment = json.loads(path.read_text())
    path.write_text(json.dumps(environment | {"torch": "1.0"}))
    run, heard = warnings_of(tmp_path)
    run.close()
    assert heard == [
        f"{tmp_path} was begun with torch 1.0 and goes on with {torch.__version__}: it need not be, bit for bit, the "
        "run that it would have been."
    ]
    path.write_text("{")
    run, heard = warnings_of(tmp_path)
    run.close()
    assert len(heard) == 1 and heard[0].startswith(f"{path} cannot be read (")
    assert heard[0].endswith("so the environment is not compared with the one before.")


# -- damage -------------------------------------------------------------------------------------------------------


def _flip(path: Path, position: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[position] ^= 1
    path.write_bytes(contents)


@pytest.mark.parametrize("where", ["tensors", "numbers", "header", "cut", "empty", "text"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(where: str, tmp_path: Path, whole: Trainer) -> None:
    tiny.advance(tiny.trainer(tmp_path), 3)
    path = tmp_path / CHECKPOINT
    contents = path.read_bytes()
    if where == "tensors":
        _flip(path, len(contents) - 100)
    elif where == "numbers":
        _flip(path, contents.index(b"0.05"))  # the lr: still a number, and not the one that was written
    elif where == "header":
        _flip(path, 3)
    elif where == "cut":
        path.write_bytes(contents[: len(contents) // 2])
    else:
        path.write_bytes(b"" if where == "empty" else b"hello" * 100)
    run, heard = warnings_of(tmp_path)
    assert run.epoch == 2
    assert len(heard) == 1 and heard[0].startswith(str(path))
    assert heard[0].endswith(f"; going on from {PREVIOUS}, after epoch 2.")
    checkpoint.load(path)  # the damaged one is gone, before it could become the spare
    run.fit()
    tiny.assert_same(run, whole)


def test_two_damaged_checkpoints_are_both_named(tmp_path: Path) -> None:
    tiny.advance(tiny.trainer(tmp_path), 3)
    for name in (CHECKPOINT, PREVIOUS):
        _flip(tmp_path / name, -1)
    with pytest.raises(Damaged) as caught:
        tiny.trainer(tmp_path)
    damage = "is damaged: the SHA-256 of its contents is not the one that it holds"
    assert str(caught.value) == (
        f"{tmp_path / CHECKPOINT} {damage}; {tmp_path / PREVIOUS} {damage}. There is nothing to go on from: put a good "
        "copy back, or begin anew with --fresh."
    )


def test_damaged_metrics_are_named_and_the_checkpoint_before_is_used(tmp_path: Path, whole: Trainer) -> None:
    tiny.advance(tiny.trainer(tmp_path), 3)
    path = tmp_path / "metrics.jsonl"
    _flip(path, -20)  # in the line of epoch 3
    run, heard = warnings_of(tmp_path)
    assert run.epoch == 2
    assert len(heard) == 1 and heard[0].startswith(f"{path} is damaged: its first ")
    assert heard[0].endswith(
        f"bytes are not those of the 3 epochs that {CHECKPOINT} knows of; going on from {PREVIOUS}, after epoch 2."
    )
    run.fit()
    tiny.assert_same(run, whole)


@pytest.mark.parametrize("missing", [False, True])
def test_metrics_damaged_at_the_start_leave_nothing_to_go_on_from(missing: bool, tmp_path: Path) -> None:
    tiny.advance(tiny.trainer(tmp_path), 3)
    path = tmp_path / "metrics.jsonl"
    if missing:
        path.unlink()
    else:
        _flip(path, 5)
    with pytest.raises(Damaged, match=r"metrics\.jsonl is damaged: .*There is nothing to go on from"):
        tiny.trainer(tmp_path)


def test_a_missing_checkpoint_is_the_one_before(tmp_path: Path, whole: Trainer) -> None:
    """A process killed between the two renames leaves this."""
    tiny.advance(tiny.trainer(tmp_path), 3)
    (tmp_path / CHECKPOINT).unlink()
    run = tiny.trainer(tmp_path)
    assert run.epoch == 2
    run.fit()
    tiny.assert_same(run, whole)


def test_a_missing_or_damaged_config_is_named(tmp_path: Path) -> None:
    tiny.advance(tiny.trainer(tmp_path), 1)
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(Damaged, match=r"config\.json is damaged \(.*\); put it back, or begin anew with --fresh\."):
        tiny.trainer(tmp_path)
    path.unlink()
    with pytest.raises(Damaged, match=r"config\.json is missing though there is a run in the folder; put it back,"):
        tiny.trainer(tmp_path)


def test_the_checkpoint_of_another_config_is_refused(tmp_path: Path) -> None:
    tiny.advance(tiny.trainer(tmp_path / "a"), 1)
    tiny.advance(tiny.trainer(tmp_path / "b", lr=0.2), 1)
    os.replace(tmp_path / "b" / CHECKPOINT, tmp_path / "a" / CHECKPOINT)
    with pytest.raises(Damaged, match=r"checkpoint\.safetensors belongs to another config than config\.json\. There"):
        tiny.trainer(tmp_path / "a")


def test_what_a_checkpoint_cannot_hold_is_named() -> None:
    with pytest.raises(TypeError, match=r"run\.schedule\.f is function; a checkpoint holds numbers, text, tensors, "):
        codec.pack({"schedule": {"f": _flip}}, "run", {})


def test_numbers_survive_exactly() -> None:
    values = {"a": (0.1, 1e-320, float("inf"), 2**63), 3: [None, True, "x"], "t": torch.tensor([0.1, float("nan")])}
    tensors: dict[str, torch.Tensor] = {}
    packed = json.loads(json.dumps(codec.pack(copy.deepcopy(values), "run", tensors)))
    found = codec.unpack(packed, tensors)
    assert repr(found) == repr(values)


# -- a full disk --------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, whole: Trainer) -> None:
    class Fill(Callback):
        """From the third epoch on the checkpoint goes to a device that is always full."""

        def batch(self, run: Trainer, done: int, total: int) -> None:
            if run.epoch == 2 and done == 1:
                (tmp_path / (CHECKPOINT + ".part")).symlink_to("/dev/full")

    run = tiny.trainer(tmp_path, callbacks=[Fill()])
    with pytest.raises(files.NoSpace) as caught:
        run.fit()
    assert str(caught.value) == (
        f"there is no space left to write {tmp_path / CHECKPOINT}; free some and go on with --resume: what was "
        "written before is whole."
    )
    resumed = tiny.trainer(tmp_path)
    assert resumed.epoch == 2
    resumed.fit()
    tiny.assert_same(resumed, whole)


def test_a_full_disk_under_the_metrics_is_named(tmp_path: Path) -> None:
    class Fill(Callback):
        def batch(self, run: Trainer, done: int, total: int) -> None:
            if run.epoch == 1 and done == 1:
                (tmp_path / "metrics.jsonl").rename(tmp_path / "aside")
                (tmp_path / "metrics.jsonl").symlink_to("/dev/full")

    with pytest.raises(files.NoSpace, match=r"there is no space left to write .*metrics\.jsonl; free some"):
        tiny.trainer(tmp_path, callbacks=[Fill()]).fit()
    os.replace(tmp_path / "aside", tmp_path / "metrics.jsonl")
    assert tiny.trainer(tmp_path).epoch == 1


def test_other_errors_of_the_disk_are_not_renamed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.replace(tmp_path / "nowhere" / "file", b"")


# -- who may write ------------------------------------------------------------------------------------------------


def test_a_folder_in_use_is_refused_with_the_process(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "import tiny, pathlib, time\n"
        f"run = tiny.trainer(pathlib.Path({str(tmp_path)!r}))\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(InUse, match=rf"run folder {tmp_path} is in use by process {other.pid}\."):
            tiny.trainer(tmp_path)
        with pytest.raises(InUse):
            Folder(tmp_path, tiny.config(), print).clear()
    finally:
        other.kill()
        other.wait()
        assert other.stdout is not None
        other.stdout.close()
    tiny.trainer(tmp_path).close()  # the lock went with the process


def test_a_run_holds_its_folder_until_it_is_closed(tmp_path: Path) -> None:
    first = tiny.trainer(tmp_path)
    with pytest.raises(InUse, match=rf"in use by process {os.getpid()}\."):
        tiny.trainer(tmp_path)
    first.close()
    second = tiny.trainer(tmp_path)
    second.fit()
    del second
    tiny.trainer(tmp_path).close()


def test_clearing_removes_the_run_and_nothing_else(tmp_path: Path) -> None:
    tiny.advance(tiny.trainer(tmp_path), 1)
    (tmp_path / "notes.txt").write_text("mine")
    assert folder.holds_run(tmp_path)
    place = Folder(tmp_path, tiny.config(), print)
    place.clear()
    place.release()
    assert not folder.holds_run(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "notes.txt"]


def test_missing_safetensors_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(JetplaneError, match=r"need the package safetensors; install it with pip install safetensors\."):
        tiny.trainer(tmp_path)
    assert tiny.trainer(epochs=1).fit().reason == "finished"  # without a folder it is not needed


@pytest.mark.parametrize("name", [*folder._OURS, folder.LOCK])
def test_a_directory_where_a_file_should_be_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(IsADirectoryError, match=rf"{name} is a directory; expected a file of a run, or nothing\."):
        tiny.trainer(tmp_path)


def test_a_file_where_the_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match=r"file is a file; expected a directory, in which the run"):
            tiny.trainer(path)
    assert (tmp_path / "file").read_text() == "mine"
