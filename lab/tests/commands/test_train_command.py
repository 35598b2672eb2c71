"""``jetplane train``: what it prints, what it refuses, and that kill -9 at any moment loses nothing."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from jetplane.cli import main
from jetplane_lab.training import Callback, Config, Trainer, checkpoint
from jetplane_lab.training.folder import CHECKPOINT
from jetplane_lab.training.stopping import Stop

SHORT = ["--dataset", "digits", "--batch-size", "3000", "--epochs", "2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs go to a folder of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_in(path: str) -> dict[str, Any]:
    return json.loads(Path(path, "config.json").read_text())


# -- what it does -------------------------------------------------------------------------------------------------


def test_a_preset_is_trained_with_options_on_top(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "lr-backprop", *SHORT]) == 0
    config = config_in("runs/lr-backprop/seed-0")
    assert (config["lr"], config["batch_size"], config["epochs"], config["dataset"]) == (0.03561, 3000, 2, "digits")
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "runs/lr-backprop/seed-0: finished 2 epochs."
    assert "2 forward passes a step, peak memory" in lines[1] and lines[1].endswith("(resident set).")
    assert max(map(len, lines)) <= 80
    assert lines[3].split() == ["last", "epoch", "paper:", "Backpropagation"]
    assert [line[:12].strip() for line in lines[4:]] == ["train NLL", "train acc.", "valid. NLL", "valid. acc."]
    assert lines[4].split()[-3:] == ["0.2265", "±", "0.0000"] and len({len(line) for line in lines[3:]}) == 1
    logged = captured.err.splitlines()
    assert logged[0].startswith("lr-backprop seed 0: epoch 1/2: lr 0.0356, train ") and len(logged) == 2


def test_any_step_of_a_run_with_a_journal_is_rebuilt(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--preset", "lr-fomoh-2d", *SHORT, "--out", "run", "--quiet"]
    assert main([*command, "--journal"]) == 0
    assert main(["replay", "run/journal", "--verify", "--step", "2", "--out", "step-2.safetensors"]) == 0
    assert "run/journal: 4 steps replayed; there is no checksum" in capsys.readouterr().out
    assert main(["replay", "run/journal", "--out", "last.safetensors"]) == 0
    found, expected = load_file("last.safetensors"), checkpoint.load(Path("run", CHECKPOINT)).model
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(load_file("step-2.safetensors")["linear.weight"], found["linear.weight"])
    capsys.readouterr()
    assert main(["train", "--method", "adam", "--lr", "0.1", *SHORT, "--journal", "--out", "other"]) == 2
    assert "the optimizer is Adam, whose update is no sum of directions" in capsys.readouterr().err


def test_several_seeds_together_and_in_turn_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--preset", "lr-backprop", *SHORT, "--seeds", "0", "1"]
    assert main([*command, "--out", "a", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main([*command, "--out", "b", "--together"]) == 0
    assert "2 seeds " in capsys.readouterr().out
    for seed in ("seed-0", "seed-1"):
        ours, theirs = (checkpoint.load(Path(out, seed, CHECKPOINT)).model for out in ("a", "b"))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert config_in("a/seed-1")["seed"] == 1


def test_a_method_without_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--method", "fgd", "--model", "logistic-regression", "--k", "2", "--lr", "1e-4", *SHORT]
    assert main([*command, "--divergence", "none", "--seed", "7", "--hold-out", "500", "--tf32"]) == 0
    config = config_in("runs/logistic-regression-fgd-2d/seed-7")
    assert (config["k"], config["divergence"], config["seed"], config["hold_out"]) == (2, None, 7, 500)
    assert config["tf32"] is True
    assert "paper" not in capsys.readouterr().out


def test_another_method_than_the_presets_takes_none_of_its_options() -> None:
    assert main(["train", "lr-fomoh-2d-sch", "--method", "adam", "--lr", "0.001", *SHORT, "--quiet"]) == 0
    config = config_in("runs/lr-fomoh-2d-sch/seed-0")
    assert (config["method"], config["k"], config["schedule"]) == ("adam", 1, "none")
    assert config["model"] == "logistic-regression"


def test_an_existing_run_is_gone_on_with_or_removed_only_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "lr-backprop", *SHORT, "--out", "here", "--quiet"]
    assert main(command) == 0
    assert main(command) == 2
    assert capsys.readouterr().err == (
        "jetplane: here holds a run already; go on with it by --resume, begin anew with --fresh, or choose another "
        "--out (--debug shows the traceback).\n"
    )
    before = Path("here/metrics.jsonl").read_text()
    assert main([*command, "--resume"]) == 0
    assert Path("here/metrics.jsonl").read_text() == before
    assert main([*command, "--lr", "0.1", "--resume"]) == 2
    assert "here holds a run with lr 0.03561, but 0.1 was asked for" in capsys.readouterr().err
    assert main([*command, "--lr", "0.1", "--fresh"]) == 0
    assert config_in("here")["lr"] == 0.1


def test_a_diverged_run_fails_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "lr-backprop", *SHORT, "--epochs", "9", "--lr", "1e38", "--quiet"]) == 1
    assert "runs/lr-backprop/seed-0: diverged in epoch " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quik"], "preset is 'quik'; did you mean quick? expected one of lr-fgd, "),
        (["--method", "fomo"], "method is 'fomo'; did you mean fomoh? expected one of "),
        (["quick", "--model", "cn"], "model is 'cn'; did you mean cnn? expected one of logistic-regression, cnn"),
        ([], "nothing to train; expected a preset such as quick, or --method"),
        (["quick", "--preset", "lr-fgd"], "two presets are given, quick and lr-fgd; expected one"),
        (["quick", "--seeds", "1", "1"], "--seeds are 1 1; expected each seed once"),
        (["quick", "--schedule", "custom"], "schedule is 'custom', which needs a function; expected a Trainer in"),
        (["quick", "--lr", "-1"], "lr is -1.0; expected a positive, finite number"),
        (["lr-fgd", "--dataset", "digits", "--tracker", "tensorbord"], "tracker is 'tensorbord'; did you mean tensorb"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *arguments, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"jetplane: {message}") and error.count("\n") == 1
    assert not Path("runs").exists()


def test_a_k_that_does_not_fit_is_refused_before_anything_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "cnn-fomoh-3d", "--k", "5000", "--dataset", "digits", "--device", "cpu", "--batch-size", "6000"]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert error.startswith("jetplane: k is 5000: a step needs about ") and "the largest k that fits is " in error
    assert not Path("runs").exists()


def test_help_names_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert "cnn-fomoh-3d-sch" in text and "--resume" in text and "quick" in text


# -- kill -9 ------------------------------------------------------------------------------------------------------


def _killed(command: list[str], out: Path, kills: int, within: float, seed: int) -> int:
    """Start the command again and again, killing it at random moments after it took hold of its folder."""
    generator = random.Random(seed)
    landed = 0
    for attempt in range(kills):
        process = subprocess.Popen([*command, *(["--resume"] if attempt else [])], stderr=subprocess.PIPE, text=True)
        lock = out / "lock"
        while process.poll() is None and not (lock.exists() and lock.read_text() == str(process.pid)):
            time.sleep(0.002)
        time.sleep(generator.uniform(0.0, within))
        process.kill()
        _, error = process.communicate()
        landed += process.returncode == -9
        assert process.returncode in (-9, 0), error
    return landed


def _check(out: Path, expected: Trainer) -> None:
    state = checkpoint.load(out / CHECKPOINT)
    for name, value in expected.model.state_dict().items():
        assert torch.equal(state.model[name], value), name
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, expected.config.epochs + 1))
    assert [line["train_nll"] for line in lines] == [metrics.train_nll for metrics in expected.history]
    assert [line["validation_nll"] for line in lines] == [metrics.validation_nll for metrics in expected.history]
    assert json.loads((out / "summary.json").read_text())["reason"] == "finished"
    assert not list(out.glob("*.part"))


_PLANE = {"model": "logistic-regression", "method": "fomoh-kd", "k": 2, "lr": 0.05, "batch_size": 1500}


def _kill_and_resume(kills: int, epochs: int, within: float, tmp_path: Path, what: dict[str, Any] = _PLANE) -> None:
    options: dict[str, Any] = {
        "epochs": epochs,
        "dataset": "digits",
        "device": "cpu",
        "schedule": "rise",
        "patience": 1,
    }
    options |= what
    command = [sys.executable, "-m", "jetplane", "train", "--out", str(tmp_path / "run"), "--quiet"]
    command += ["--checkpoint-seconds", "0"]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    landed = _killed(command, tmp_path / "run", kills, within, seed=kills)
    assert landed >= kills - 1
    subprocess.run([*command, "--resume"], check=True, timeout=300)
    uninterrupted = Trainer(Config(**options))
    uninterrupted.fit()
    _check(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_kill_and_resume_is_the_run_that_was_never_killed(tmp_path: Path) -> None:
    _kill_and_resume(kills=2, epochs=12, within=0.8, tmp_path=tmp_path)


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path) -> None:
    _kill_and_resume(kills=20, epochs=150, within=0.8, tmp_path=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forward-adam", "horizon"])
def test_kill_and_resume_on_forward_gradients(method: str, tmp_path: Path) -> None:
    what = {"model": "cnn", "method": method, "samples": 2, "batch_size": 100, "hold_out": 5700, "schedule": "cosine"}
    _kill_and_resume(kills=3, epochs=8, within=4.0, tmp_path=tmp_path, what=what)


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_is_answered_with_its_exit_status(
    name: str, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from jetplane_lab.commands import train

    class Ask(Callback):
        def batch(self, run: Trainer, done: int, total: int) -> None:
            run.stop = Stop(name)

    monkeypatch.setattr(train, "progress", lambda label, position: Ask())
    command = ["train", "lr-backprop", *SHORT, "--seeds", "0", "1"]
    assert main(command) == status
    captured = capsys.readouterr()
    assert f"runs/lr-backprop/seed-0: stopped by {name} after epoch 1 of 2. Go on with --resume.\n" in captured.err
    assert not Path("runs/lr-backprop/seed-1").exists()
    assert main([*command, "--resume", "--quiet"]) == 0


@pytest.mark.parametrize("seconds", ["nan", "-1", "soon"])
def test_seconds_between_checkpoints_are_refused_in_words(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "quick", f"--checkpoint-seconds={seconds}"])
    assert f"is '{seconds}'; expected a number of seconds from 0, or inf for never" in capsys.readouterr().err
