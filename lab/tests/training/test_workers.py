"""A run by several processes: what one process does of it, what is refused, and torchrun itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

from jetplane.cli import main
from jetplane_lab import methods
from jetplane_lab.training import Trainer
from jetplane_lab.training.workers import ALONE, Workers
from tiny import config, dataset


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


@pytest.mark.parametrize("option", ["--resume", "--compile"])
def test_what_processes_cannot_do_together_is_refused(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(Workers, "launched", staticmethod(lambda: Workers(0, 2)))
    assert main(["train", "quick", "--dataset", "digits", "--device", "cpu", "--out", str(tmp_path), option]) == 2
    assert f"{option} is not there for several processes yet; expected a run by one process" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fomoh-kd", "gauss-newton", "horizon", "forward-adam"])
def test_torchrun_trains_the_same_run(method: str, tmp_path: Path) -> None:
    """Two processes, and one: the same metrics up to rounding."""
    asked = ["-m", "jetplane", "train", "--method", method, "--model", "logistic-regression", "--dataset", "digits"]
    asked += ["--epochs", "2", "--batch-size", "1000", "--dtype", "float64", "--device", "cpu", "--quiet", "--out"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *launcher, *asked, str(tmp_path / "two")], check=True, env=environment)
    subprocess.run([sys.executable, *asked, str(tmp_path / "one")], check=True, env=environment)
    two, one = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("two", "one")
    )
    assert len(two) == len(one) == 2
    for ours, theirs in zip(two, one, strict=True):
        for name in ("train_nll", "train_accuracy", "validation_nll", "validation_accuracy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9), name
