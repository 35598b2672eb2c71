"""``jetplane reproduce cifar10`` on few images of noise: rates chosen on images held out, a table, and going on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jetplane.cli import main
from jetplane_lab import data
from jetplane_lab.commands import cifar10
from jetplane_lab.commands.cifar10 import ROWS
from jetplane_lab.data import Dataset, Split
from jetplane_lab.presets import CIFAR


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of noise, and two rates to choose from."""
    generator = torch.Generator().manual_seed(0)

    def split(count: int) -> Split:
        images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
        return Split(images, torch.arange(count) % 10)

    whole = Dataset("cifar-10", split(40), split(20), "made up", {})
    monkeypatch.setattr(data, "load", lambda name, data_dir: whole)
    monkeypatch.setitem(ROWS, "adam-cnn", ROWS["adam-cnn"]._replace(rates=(1e-3, 1e-30)))
    monkeypatch.setitem(cifar10._QUICK, "batch_size", 20)


def asked(out: Path, *rows: str) -> list[str]:
    return ["reproduce", "cifar10", "--quick", "--device", "cpu", "--out", str(out), "--rows", *rows]


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def test_a_rate_is_chosen_on_images_held_out_and_trained_with_on_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(asked(tmp_path, "adam-cnn")) == 0
    shown = capsys.readouterr()
    assert "has the best validation accuracy (0.001: " in shown.err
    folder = tmp_path / "adam-cifar-cnn"
    assert {path.name for path in folder.iterdir()} == {"seed-0", "choice-lr-0.001", "choice-lr-1e-30"}
    tried, final = config(folder / "choice-lr-0.001" / "seed-0"), config(folder / "seed-0")
    assert (tried["hold_out"], final["hold_out"]) == (4, 0)
    table = (tmp_path / "cifar10.md").read_text()
    assert table.splitlines()[-1].startswith("| `adam-cifar-cnn`: Backpropagation, Adam | ") and table in shown.out
    assert (tmp_path / "report.html").exists()
    assert main(asked(tmp_path, "adam-cnn")) == 0
    assert "runs to do" not in capsys.readouterr().err, "what is finished was trained again"
    assert (tmp_path / "cifar10.md").read_text() == table


def test_a_row_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = cifar10.fit

    def fails(preset: Any, *rest: Any) -> Any:
        if preset.name == "adam-cifar-resnet-augmented":
            raise RuntimeError("out of memory")
        return fit(preset, *rest)

    monkeypatch.setattr(cifar10, "fit", fails)
    assert main(asked(tmp_path, "adam-resnet", "adam-cnn")) == 1
    assert "adam-cifar-resnet-augmented failed: out of memory" in capsys.readouterr().err
    assert "adam-cifar-cnn" in (tmp_path / "cifar10.md").read_text()


def test_an_unknown_row_is_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(asked(tmp_path / "none", "adam-cnn", "resnett")) == 2
    assert "row is 'resnett'; did you mean resnet?" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_signal_stops_it_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jetplane_lab.training import Trainer

    work = Trainer.work

    def stopped(self: Trainer) -> Any:
        self.stop.by = "SIGTERM"
        return work(self)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "work", stopped)
        assert main(asked(tmp_path, "adam-cnn")) == 130
    assert "The same command goes on from here." in capsys.readouterr().err
    assert main(asked(tmp_path, "adam-cnn")) == 0


def test_all_rows_are_presets_and_the_quick_images_are_few() -> None:
    assert all(row.preset in CIFAR for row in ROWS.values())
    assert all(row.rates == () for row in ROWS.values() if row.preset.startswith("cifar"))
    assert ROWS["adam-resnet"].rates == cifar10.RATES


@pytest.mark.slow
def test_horizon_has_no_rate(tmp_path: Path) -> None:
    assert main(asked(tmp_path, "cnn")) == 0
    line = (tmp_path / "cifar10.md").read_text().splitlines()[-1]
    assert line.startswith("| `cifar-cnn`: HorizonAdam | none | 1 | 1 | ") and line.endswith("| 0.0 |")
