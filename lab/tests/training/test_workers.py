"""A run by several processes: what one process does of it, what is refused, and torchrun itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from jetplane.cli import main
from jetplane.journal import verify
from jetplane_lab import methods
from jetplane_lab.training import Trainer
from jetplane_lab.training.checkpoint import load
from jetplane_lab.training.workers import ALONE, Workers
from many_processes import Place, launch, message, torchrun
from tiny import MEASURED, config, dataset


def test_shards_are_a_batch_in_its_order() -> None:
    index = torch.randperm(23)
    parts = [Workers(rank, 4).shard(index) for rank in range(4)]
    assert torch.equal(torch.cat(parts), index) and [len(part) for part in parts] == [6, 6, 6, 5]


def test_alone_nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Workers.launched() is ALONE and ALONE.writes
    assert ALONE.total(7) == 7 and ALONE.any(True) and not ALONE.any(False)
    ALONE.leave()


def test_without_torch_distributed_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(distributed, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 2, but this torch has no torch.distributed; expected 1."):
        Workers.launched()


def test_only_the_first_process_has_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"folder is .* in process 1; expected None, for the first one writes."):
        Trainer(config(), dataset(), tmp_path, workers=Workers(1, 2))


@pytest.mark.parametrize("method", ["adam", "sgd", "backprop", "mezo", "fzoo"])
def test_backprop_and_zeroth_order_are_for_one_process(method: str) -> None:
    with pytest.raises(ValueError, match=rf"method is '{method}', which is trained by one process; expected a search"):
        methods.make(config(method=method), [torch.ones(2, requires_grad=True)], object())


@pytest.mark.parametrize("option", ["--together", "--compile"])
def test_what_processes_cannot_do_together_is_refused(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(Workers, "launched", staticmethod(lambda: Workers(0, 2)))
    assert main(["train", "quick", "--dataset", "digits", "--device", "cpu", "--out", str(tmp_path), option]) == 2
    assert f"{option} is not there for several processes yet; expected a run by one process" in capsys.readouterr().err


def asked(method: str, epochs: int, *more: str, size: int = 1000) -> list[str]:
    """A run in float64, without the folder that it is to be in."""
    common = ["-m", "jetplane", "train", "--method", method, "--model", "logistic-regression", "--dataset", "digits"]
    common += ["--batch-size", str(size), "--dtype", "float64", "--device", "cpu", "--quiet", "--epochs", str(epochs)]
    return [*common, *more, "--out"]


def in_turn(command: list[str], folder: Path) -> None:
    subprocess.run([*command, str(folder)], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=900)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def measured(folder: Path) -> list[dict[str, Any]]:
    """The metrics but for what is no function of the config."""
    return [{name: value for name, value in line.items() if name not in MEASURED} for line in lines(folder)]


NEAR = ("train_nll", "train_accuracy", "validation_nll", "validation_accuracy")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fomoh-kd", "gauss-newton", "horizon", "forward-adam"])
def test_torchrun_trains_the_same_run(method: str, tmp_path: Path) -> None:
    """Two processes, and one: the same metrics up to rounding."""
    in_turn([*torchrun(2), *asked(method, 2)], tmp_path / "two")
    in_turn([sys.executable, *asked(method, 2)], tmp_path / "one")
    two, one = lines(tmp_path / "two"), lines(tmp_path / "one")
    assert len(two) == len(one) == 2
    for ours, theirs in zip(two, one, strict=True):
        for name in NEAR:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9), name


def led(place: Place) -> list[str]:
    """What the first process finds, and what is said where it fails."""

    def failing() -> str:
        raise KeyError("a broken disk")

    workers = Workers(place.rank, place.size, place.group)
    return [workers.led(lambda: f"by {place.rank}", "a look"), message(lambda: workers.led(failing, "a look"))]


def jobs() -> dict[str, Callable[[Place], Any]]:
    return {"led": led}


def test_what_the_first_process_finds_is_known_to_all(tmp_path: Path) -> None:
    one, other = (found["led"] for found in launch(tmp_path / "led", 2, jobs))
    assert one == ["by 0", "KeyError: 'a broken disk'"]
    lost = "LostProcess: process 0 could not go on at a look; what went wrong is in the message there."
    assert other == ["by 0", lost]


def killed_at(folder: Path, epoch: int, whom: Callable[[int], int]) -> None:
    """Kill a process when so many epochs are done: the first one, which says in the lock who it is, or another."""
    until = time.monotonic() + 900
    while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_bytes().splitlines()) < epoch:
        assert time.monotonic() < until
        time.sleep(0.02)
    os.kill(whom(int((folder / "lock").read_text())), signal.SIGKILL)


def neighbour(pid: int) -> int:
    """Another worker of the same launcher."""
    parents = {int(path.name): int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1]) for path in here()}
    return next(one for one, parent in parents.items() if parent == parents[pid] and one != pid)


def here() -> Iterator[Path]:
    """The processes of this machine that are still there when they are looked at."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            (path / "stat").read_text()
            yield path


@pytest.mark.slow
@pytest.mark.parametrize(("method", "whom"), [("fomoh-kd", int), ("horizon", neighbour)])
def test_a_killed_run_goes_on_with_as_many_processes_or_others(
    method: str, whom: Callable[[int], int], tmp_path: Path
) -> None:
    """Started again by torchrun, or by hand; the bits of the undisturbed run where the processes are as many."""
    journal = ["--journal"] if method == "fomoh-kd" else []
    run_of = partial(asked, method, 6, "--checkpoint-seconds", "0", *journal, size=100)
    in_turn([*torchrun(2), *run_of()], tmp_path / "whole")
    command = [*torchrun(2, "--max-restarts", "3"), *run_of("--resume"), str(tmp_path / "killed")]
    run = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    for epoch in (2, 4):
        killed_at(tmp_path / "killed", epoch, whom)
        time.sleep(0.5)  # the file of metrics is cut to the last checkpoint before more is written
    assert run.wait(900) == 0
    assert measured(tmp_path / "killed") == measured(tmp_path / "whole")
    ends = [load(tmp_path / name / "checkpoint.safetensors") for name in ("killed", "whole")]
    assert all(torch.equal(value, ends[1].model[name]) for name, value in ends[0].model.items())
    if method == "fomoh-kd":
        verify(tmp_path / "killed" / "journal")
    for size in (1, 3):  # a run that was stopped after two epochs, by others
        part = tmp_path / str(size)
        stopped = subprocess.Popen([*torchrun(2), *run_of(), str(part)], env=os.environ | {"OMP_NUM_THREADS": "1"})
        killed_at(part, 2, whom)
        assert stopped.wait(900) != 0
        in_turn([*torchrun(size), *run_of("--resume")], part)
        for ours, theirs in zip(lines(part), lines(tmp_path / "whole"), strict=True):
            for name in NEAR:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-9), name
