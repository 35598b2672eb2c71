"""Tuning: the space, the samplers, sharing a study between processes, and the command."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from jetplane import cli
from jetplane_lab import presets
from jetplane_lab.commands import tune
from jetplane_lab.data import Dataset, load
from jetplane_lab.training import Trainer
from jetplane_lab.tuning import (
    SAMPLERS,
    Entry,
    Outcome,
    Parameters,
    Report,
    Settings,
    Study,
    configure,
    markdown,
    run_study,
    sampling,
    summary,
    training_objective,
)

optuna = pytest.importorskip("optuna")
sqlalchemy = pytest.importorskip("sqlalchemy")

SETTINGS = Settings("lr-fgd", "random", trials=6, epochs=4, lr_bounds=(1e-4, 1e-1), batch_sizes=(64, 128), hold_out=10)


@pytest.fixture(autouse=True)
def quick_and_quiet() -> Iterator[None]:
    """Do not wait for the disk: a database is as safe from kills, though not from a power failure."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def connected(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", connected)
    yield
    sqlalchemy.event.remove(sqlalchemy.Engine, "connect", connected)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


def change(**changes: Any) -> Settings:
    return dataclasses.replace(SETTINGS, **changes)


def bowl(parameters: Parameters, report: Report) -> Outcome:
    """Cheap, with its lowest score at lr 0.01."""
    return Outcome((math.log10(parameters.lr) + 2) ** 2, {"epochs": 1, "forward_equivalents": 2.0})


def search(folder: Path, settings: Settings, objective: Any = bowl) -> list[Entry]:
    with Study(folder, settings) as study:
        run_study(study, objective, poll=0.05)
        return study.entries


def check_whole(entries: list[Entry], trials: int) -> None:
    """Every draw ended, exactly once."""
    ended = Counter(entry.draw for entry in entries if entry.state in ("complete", "pruned", "failed"))
    assert ended == {draw: 1 for draw in range(trials)}
    assert not [entry for entry in entries if entry.state in ("running", "waiting")]


# -- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lr-fomoh-2d", "cnn-fgd"])
def test_the_space_of_a_preset_is_the_papers(name: str, digits: Dataset) -> None:
    preset = presets.find(name)
    settings = Settings.of(preset, digits)
    assert preset.paper is not None
    assert settings.lr_bounds == preset.paper.lr_bounds
    assert settings.batch_sizes == ((128, 512, 1024, 2048) if name.startswith("lr") else (2048,))
    assert (settings.trials, settings.sampler, settings.seed) == (100, "bayes", 0)
    assert settings.hold_out == 500  # a twelfth, as 5,000 is of MNIST's 60,000
    assert settings.data == digits.sha256
    assert settings.config["method"] == preset.config.method
    assert "lr" not in settings.config
    space = sampling.space(settings)
    assert (space["lr"].low, space["lr"].high, space["lr"].log) == (*preset.paper.lr_bounds, True)


def test_what_is_given_replaces_the_defaults(digits: Dataset) -> None:
    settings = Settings.of(presets.find("quick"), digits, epochs=10, lr_bounds=[0.1, 0.2], batch_sizes=[7], trials=None)
    assert (settings.epochs, settings.lr_bounds, settings.batch_sizes) == (10, (0.1, 0.2), (7,))
    assert (settings.trials, settings.warmup) == (100, 2)
    lr = presets.find("quick").config.lr
    assert Settings.of(presets.find("quick"), digits).lr_bounds == pytest.approx((lr / 10, lr * 10))
    with pytest.raises(ValueError, match="hold_out is 6000; expected fewer than the 6000 training examples"):
        Settings.of(presets.find("quick"), digits, hold_out=6000)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sampler", "tpe", "sampler is 'tpe'; expected one of bayes, random, grid"),
        ("trials", 0, "trials is 0; expected a whole number of at least 1"),
        ("epochs", 1.5, "epochs is 1.5; expected a whole number of at least 1"),
        ("seed", -1, "seed is -1; expected a whole number of at least 0"),
        ("lr_bounds", (0.1, 0.01), r"lr_bounds is \[0.1, 0.01\]; expected two positive numbers, the smaller first"),
        ("lr_bounds", (0.0, 0.01), r"lr_bounds is \[0.0, 0.01\]; expected two positive numbers"),
        ("lr_bounds", (0.1,), r"lr_bounds is \[0.1\]; expected two numbers"),
        ("batch_sizes", (), r"batch_sizes is \[\]; expected different whole numbers, at least one"),
        ("batch_sizes", (64, 64), r"batch_sizes is \[64, 64\]; expected different"),
        ("batch_sizes", (64, "x"), "batch_sizes is 'x'; expected a whole number"),
    ],
)
def test_bad_settings_are_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change(**{field: value})


def test_settings_survive_the_disk(tmp_path: Path) -> None:
    settings = change(config={"method": "fgd", "clip": None}, data={"a": "b"})
    settings.save(tmp_path / "study.json")
    assert Settings.read(tmp_path / "study.json") == settings
    (tmp_path / "study.json").write_text('{"settings": {"preset"')
    with pytest.raises(ValueError, match=r"study\.json is damaged \(.*\); expected the settings of a study"):
        Settings.read(tmp_path / "study.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 5}, "epochs is 4 there and 5 here"),
        ({"lr_bounds": (1e-3, 1e-1)}, r"lr_bounds is \[0.0001, 0.1\] there and \[0.001, 0.1\] here"),
        ({"config": {"method": "fomoh"}}, 'config.method is "fgd" there and "fomoh" here'),
        ({"data": {"train": "1"}}, 'data.train is "0" there and "1" here'),
        ({"seed": 9, "data": {}}, "seed is 0 there and 9 here"),
    ],
)
def test_a_study_with_other_settings_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    settings = change(trials=1, config={"method": "fgd"}, data={"train": "0"})
    search(tmp_path, settings)
    before = (tmp_path / "study.json").read_text()
    with pytest.raises(ValueError, match=f"holds another study: {message}; give the same settings or a new folder"):
        Study(tmp_path, dataclasses.replace(settings, **changes))
    assert (tmp_path / "study.json").read_text() == before


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    search(tmp_path, change(trials=1))
    database = (tmp_path / "study.db").read_bytes()
    (tmp_path / "study.db").write_bytes(b"x" * 4096)
    with pytest.raises(OSError, match=r"study\.db cannot be used: .*not a database"):
        Study(tmp_path, change(trials=1))
    (tmp_path / "study.db").write_bytes(database)
    (tmp_path / "study.json").unlink()
    with pytest.raises(ValueError, match=r"has a study\.db but no study\.json, so its settings are unknown"):
        Study(tmp_path, change(trials=1))


@pytest.mark.parametrize("how", ["is missing", "is empty", "holds no study"])
def test_a_lost_database_is_said_and_not_begun_anew(tmp_path: Path, how: str) -> None:
    search(tmp_path, change(trials=1))
    path = tmp_path / "study.db"
    path.unlink()
    if how == "is empty":
        path.touch()
    elif how == "holds no study":
        optuna.storages.RDBStorage(f"sqlite:///{path}").engine.dispose()
    with pytest.raises(ValueError, match=rf"study\.db {how}, though study\.json is there: the trials .* are lost"):
        Study(tmp_path, change(trials=1))


def test_a_kill_before_the_settings_were_written_loses_nothing(tmp_path: Path) -> None:
    Study(tmp_path, change(trials=1)).close()
    (tmp_path / "study.json").unlink()  # the database is made first
    check_whole(search(tmp_path, change(trials=1)), 1)


@pytest.mark.parametrize("name", ["study.json", "study.db", "summary.json", ".lock"])
def test_a_directory_where_a_file_of_a_study_should_be_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(IsADirectoryError, match=rf"{name} is a directory; expected a file of a study, or nothing"):
        Study(tmp_path, change(trials=1))


def test_a_file_where_the_study_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"file is a file; expected a directory for the study"):
        Study(tmp_path / "file", change(trials=1))


def test_without_optuna_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"tuning needs optuna, .*: pip install '\./lab\[tune\]' in a checkout"):
        Study(tmp_path, SETTINGS)


# -- samplers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_draws_within_the_space_and_depends_on_the_seed(tmp_path: Path, sampler: str) -> None:
    settings = change(sampler=sampler, trials=12)
    drawn = [entry.parameters for entry in search(tmp_path / "a", settings)]
    again = [entry.parameters for entry in search(tmp_path / "b", settings)]
    other = [entry.parameters for entry in search(tmp_path / "c", dataclasses.replace(settings, seed=1))]
    assert drawn == again
    assert drawn != other
    assert len(set(drawn)) == 12
    for parameters in drawn:
        assert parameters is not None
        assert 1e-4 <= parameters.lr <= 1e-1
        assert parameters.batch_size in (64, 128)


def test_a_grid_has_its_bounds_equal_ratios_and_all_batch_sizes() -> None:
    points = sampling.grid(change(sampler="grid", trials=8))
    assert len(points) == 8
    for size in (64, 128):
        rates = sorted(point["lr"] for point in points if point["batch_size"] == size)
        assert rates == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])
        assert (rates[0], rates[-1]) == (1e-4, 1e-1)
    assert [point["lr"] for point in sampling.grid(change(trials=1, batch_sizes=(8,)))] == pytest.approx([10**-2.5])
    assert len(sampling.grid(change(trials=7))) == 7


def test_bayes_learns_where_the_good_ones_lie(tmp_path: Path) -> None:
    """After the random beginning, draws lie closer to the best lr, 0.01, than 5/6 of a decade: uniform ones' mean."""
    entries = search(tmp_path, change(sampler="bayes", trials=35))[15:]
    distances = [abs(math.log10(entry.parameters.lr) + 2) for entry in entries if entry.parameters]
    assert sum(distances) / len(distances) < 0.6 * 5 / 6


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_study_that_was_stopped_draws_what_it_would_have_drawn(tmp_path: Path, sampler: str) -> None:
    settings = change(sampler=sampler, trials=14)
    whole = search(tmp_path / "whole", settings)
    calls = 0

    def interrupted(parameters: Parameters, report: Report) -> Outcome:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return bowl(parameters, report)

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "parts", settings, interrupted)
    entries = search(tmp_path / "parts", settings)
    check_whole(entries, 14)
    assert [entry.state for entry in entries].count("cut off") == 1
    parts = {entry.draw: (entry.parameters, entry.value) for entry in entries if entry.state == "complete"}
    assert parts == {entry.draw: (entry.parameters, entry.value) for entry in whole}


def test_trials_may_be_raised_but_not_those_of_a_grid(tmp_path: Path) -> None:
    assert len(search(tmp_path / "random", change(trials=2))) == 2
    assert len(search(tmp_path / "random", change(trials=3))) == 3
    assert Settings.read(tmp_path / "random" / "study.json").trials == 3
    assert len(search(tmp_path / "random", change(trials=1))) == 3
    assert Settings.read(tmp_path / "random" / "study.json").trials == 3
    search(tmp_path / "grid", change(sampler="grid", trials=2))
    with pytest.raises(ValueError, match="trials is 2 there and 3 here"):
        Study(tmp_path / "grid", change(sampler="grid", trials=3))


# -- scores -------------------------------------------------------------------------------------------------------


def test_the_median_rule_prunes_after_the_warm_up(tmp_path: Path) -> None:
    """Trials get worse and worse, so all beyond the first five are above the median as soon as it is asked."""
    number = iter(range(100))

    def worse(parameters: Parameters, report: Report) -> Outcome:
        level = next(number)
        for epoch in range(1, 7):
            if report(epoch, level + 1 / epoch):
                return Outcome(math.nan, {"epochs": epoch})
        return Outcome(float(level), {"epochs": 6})

    entries = search(tmp_path, change(trials=8, epochs=6, warmup=2), worse)
    assert [entry.state for entry in entries] == ["complete"] * 5 + ["pruned"] * 3
    assert [entry.facts["epochs"] for entry in entries] == [6] * 5 + [3] * 3
    assert entries[5].value == pytest.approx(5 + 1 / 3)


def test_a_trial_that_reached_its_last_epoch_is_complete(tmp_path: Path) -> None:
    number = iter(range(100))

    def worse(parameters: Parameters, report: Report) -> Outcome:
        level = next(number)
        assert not report(1, level)
        assert not report(2, level)
        return Outcome(level)

    entries = search(tmp_path, change(trials=8, epochs=2, warmup=1), worse)
    assert {entry.state for entry in entries} == {"complete"}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_score_that_is_not_finite_is_the_worst(tmp_path: Path, sampler: str, value: float) -> None:
    def diverges(parameters: Parameters, report: Report) -> Outcome:
        if parameters.lr < 1e-2:
            return bowl(parameters, report)
        report(1, value)
        return Outcome(value, {"ended": "diverged"})

    with Study(tmp_path, change(sampler=sampler, trials=14)) as study:
        run_study(study, diverges)
        check_whole(study.entries, 14)
        assert {entry.value for entry in study.entries if entry.parameters and entry.parameters.lr >= 1e-2} == {
            math.inf
        }
        assert study.best is not None and study.best.parameters is not None
        assert study.best.parameters.lr < 1e-2
        rows = summary(study)["trials"]
    assert [row["ended"] for row in rows if row["value"] is None] == ["diverged"] * len(
        [row for row in rows if row["lr"] >= 1e-2]
    )
    json.dumps(rows, allow_nan=False)


@pytest.mark.parametrize("error", [MemoryError("no room"), torch.OutOfMemoryError("no room")])
def test_running_out_of_memory_fails_the_trial_and_not_the_study(tmp_path: Path, error: Exception) -> None:
    def hungry(parameters: Parameters, report: Report) -> Outcome:
        if parameters.batch_size == 128:
            raise error
        return bowl(parameters, report)

    entries = search(tmp_path, SETTINGS, hungry)
    check_whole(entries, 6)
    failed = [entry for entry in entries if entry.state == "failed"]
    assert 0 < len(failed) < 6
    assert {entry.facts["ended"] for entry in failed} == {f"{type(error).__name__}: no room"}


def test_any_other_error_is_raised_and_the_trial_is_tried_again(tmp_path: Path) -> None:
    def broken(parameters: Parameters, report: Report) -> Outcome:
        raise RuntimeError("broken")

    for _ in range(4):
        with pytest.raises(RuntimeError, match="broken"):
            search(tmp_path, change(trials=2), broken)
    entries = search(tmp_path, change(trials=2))
    check_whole(entries, 2)
    assert [entry.state for entry in entries].count("cut off") == 4


# -- processes ----------------------------------------------------------------------------------------------------

# Waits for a line, and writes one to "log" for every trial it begins; a trial takes so many seconds, or for ever.
_WORKER = """
import math, os, sys, time
from pathlib import Path
import optuna
from jetplane_lab.tuning import Outcome, Settings, Study, run_study

folder, how = Path(sys.argv[1]), sys.argv[2]
optuna.logging.set_verbosity(optuna.logging.WARNING)

def objective(parameters, report):
    with (folder / "log").open("a") as log:
        log.write(f"{os.getpid()} {parameters.lr!r} {parameters.batch_size}\\n")
    print("begun", flush=True)
    time.sleep(float(how))
    report(1, 1.0)
    return Outcome((math.log10(parameters.lr) + 2) ** 2, {"epochs": 1})

print("ready", flush=True)
sys.stdin.readline()
with Study(folder, Settings.read(folder / "study.json")) as study:
    run_study(study, objective, poll=0.05)
"""


_FOR_EVER = "1000"


@contextmanager
def worker(folder: Path, seconds: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is ready to work on the study once it is given a line."""
    command = [sys.executable, "-c", _WORKER, str(folder), seconds]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert read(process) == "ready"
            yield process
        finally:
            process.kill()


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def start(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.slow
def test_two_processes_share_a_study(tmp_path: Path) -> None:
    settings = change(trials=16)
    Study(tmp_path, settings).close()
    with worker(tmp_path, "0.1") as one, worker(tmp_path, "0.1") as two:
        start(one)
        start(two)
        assert (one.wait(60), two.wait(60)) == (0, 0)
    with Study(tmp_path, settings) as study:
        entries = study.entries
    check_whole(entries, 16)
    assert len(entries) == 16
    log = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert len(log) == 16
    share = Counter(int(pid) for pid, *_ in log)
    assert set(share) == {one.pid, two.pid}
    assert min(share.values()) >= 3
    # no matter who drew them, they are the draws of one process
    alone = search(tmp_path / "alone", settings)
    assert [entry.parameters for entry in entries] == [entry.parameters for entry in alone]


def test_a_trial_cut_off_by_a_kill_is_entered_again(tmp_path: Path) -> None:
    Study(tmp_path, SETTINGS).close()
    with worker(tmp_path, _FOR_EVER) as process:
        start(process)
        assert read(process) == "begun"
        with Study(tmp_path, SETTINGS) as study:
            assert [entry.state for entry in study.entries] == ["running"]
        process.kill()
        assert process.wait(10) == -signal.SIGKILL
    entries = search(tmp_path, SETTINGS)
    check_whole(entries, 6)
    assert [entry.state for entry in entries] == ["cut off"] + ["complete"] * 6
    assert entries[0].parameters == entries[1].parameters
    assert (entries[0].draw, entries[1].draw) == (0, 0)
    assert entries[0].facts["ended"] == "killed"


def test_who_waits_takes_over_from_who_dies(tmp_path: Path) -> None:
    """A process with nothing left to begin waits, since the trial of another is still running; then that is killed."""
    Study(tmp_path, SETTINGS).close()
    with worker(tmp_path, _FOR_EVER) as process:
        start(process)
        assert read(process) == "begun"
        ended: list[Entry] = []

        def count(entry: Entry) -> None:
            ended.append(entry)
            if len(ended) == 5:
                threading.Timer(0.3, process.kill).start()

        with Study(tmp_path, SETTINGS) as study:
            run_study(study, bowl, ended=count, poll=0.05)
            check_whole(study.entries, 6)
    assert [entry.draw for entry in ended] == [1, 2, 3, 4, 5, 0]


def test_a_trial_that_kills_its_process_is_given_up(tmp_path: Path) -> None:
    settings = change(trials=2)
    for _ in range(3):
        with Study(tmp_path, settings) as study:
            study.claim()  # closing lets go of the worker's lock, as a kill does
    entries = search(tmp_path, settings)
    check_whole(entries, 2)
    assert [entry.state for entry in entries] == ["cut off", "cut off", "failed", "complete"]
    assert entries[2].facts["ended"] == "its process was killed 3 times"


# For every N in arguments 2...: copy the study, and let two children in turn work on it. The first kills itself just
# before its Nth statement of SQL, the second, which finds what the first left, before its (7 N mod 150)th.
# Children are forked, because importing torch takes a second each time.
_KILLED = """
import os, shutil, signal, sys
from pathlib import Path
import optuna, sqlalchemy
from jetplane_lab.tuning import Outcome, Settings, Study, run_study

folder = Path(sys.argv[1])
optuna.logging.set_verbosity(optuna.logging.WARNING)

def objective(parameters, report):
    report(1, 1.0)
    return Outcome(parameters.lr)

def child(place, last):
    count = 0
    def statement(*_):
        nonlocal count
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", lambda c, _: c.execute("PRAGMA synchronous = OFF"))
    sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", statement)
    with Study(place, Settings.read(place / "study.json")) as study:
        run_study(study, objective)

for first in map(int, sys.argv[2:]):
    place = folder / str(first)
    shutil.copytree(folder / "new", place)
    for last in (first, 7 * first % 150):
        pid = os.fork()
        if not pid:
            child(place, last)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def _kill_at(folder: Path, statements: range) -> int:
    """Kill processes at these statements, each time in a new study, end the study, and say how many were killed."""
    settings = change(trials=3)
    expected = {entry.draw: entry.parameters for entry in search(folder / "whole", settings)}
    Study(folder / "new", settings).close()
    command = [sys.executable, "-W", "ignore", "-c", _KILLED, str(folder), *map(str, statements)]
    codes = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert set(codes) <= {str(-signal.SIGKILL), "0"}
    for first in statements:
        entries = search(folder / str(first), settings)
        check_whole(entries, 3)
        assert {entry.draw: entry.parameters for entry in entries if entry.state == "complete"} == expected, first
    return codes.count(str(-signal.SIGKILL))


@pytest.mark.slow
def test_no_draw_is_lost_or_doubled_by_a_kill(tmp_path: Path) -> None:
    assert _kill_at(tmp_path, range(25, 200, 45)) >= 7


@pytest.mark.slow
def test_no_draw_is_lost_or_doubled_by_kills_all_over_a_study(tmp_path: Path) -> None:
    assert _kill_at(tmp_path, range(2, 240, 7)) > 40


# -- summary ------------------------------------------------------------------------------------------------------


def test_a_summary_says_all_that_is_committed(tmp_path: Path) -> None:
    with Study(tmp_path, SETTINGS) as study:
        run_study(study, bowl)
        found = summary(study)
        study.save("summary.json", found)
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(found))
    assert not list(tmp_path.glob("*.part"))
    assert found["finished"]
    assert found["states"] == {"complete": 6}
    assert found["cost"]["epochs"] == 6
    assert found["cost"]["forward_equivalents"] == 12
    assert found["settings"]["lr_bounds"] == (1e-4, 1e-1)
    assert set(found["versions"]) == {"jetplane", "torch", "optuna", "python"}
    rows = found["trials"]
    assert [row["number"] for row in rows] == list(range(6))
    assert set(rows[0]) >= {"lr", "batch_size", "value", "state", "epochs", "seconds", "forward_equivalents"}
    assert found["best"] == min(rows, key=lambda row: row["value"])
    table = markdown(found, rows=4)
    assert "random search: lr from 0.0001 to 0.1 (log), batch sizes 64, 128; 4 epochs" in table
    assert f"| {found['best']['number']} | {found['best']['lr']:.4g} |" in table.splitlines()[4]
    assert "Not shown: 2 more, worse or not completed." in table


def test_a_summary_of_a_study_that_is_not_done(tmp_path: Path) -> None:
    with Study(tmp_path, SETTINGS) as study:
        found = summary(study)
        assert (found["finished"], found["best"], found["trials"]) == (False, None, [])
        assert "Trials: none" in markdown(found)
        study.claim()
        assert summary(study)["states"] == {"running": 1}


# -- real training and the command ----------------------------------------------------------------------------------


def _arguments(out: Path, *more: str) -> list[str]:
    return ["tune", "lr-backprop", "--dataset", "digits", "--device", "cpu", "--out", str(out), *more]


_SMALL = ("--trials", "2", "--epochs", "2", "--batch-sizes", "512", "1024", "--lr-bounds", "0.01", "0.5")


def test_the_command_tunes_and_a_trial_can_be_repeated(
    tmp_path: Path, digits: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(_arguments(tmp_path, *_SMALL, "--seed", "3")) == 0
    told = capsys.readouterr()
    assert "[2/2 done, best" in told.err
    assert f"summary: {tmp_path / 'summary.json'}" in told.out
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["states"] == {"complete": 2}
    assert found["device"] == "cpu"
    assert [row["epochs"] for row in found["trials"]] == [2, 2]
    assert found["cost"]["forward_equivalents"] > 4
    best = found["best"]
    assert best["value"] < math.log(10)
    assert f"best: --lr {best['lr']:.6g} --batch-size {best['batch_size']}" in told.out

    settings = Settings.read(tmp_path / "study.json")
    config = presets.find("lr-backprop").config.replace(dataset="digits")
    again = configure(config, settings, Parameters(best["lr"], best["batch_size"]))
    assert (again.seed, again.hold_out, again.epochs) == (3, 500, 2)
    values = [metrics.validation_nll for metrics in Trainer(again, digits).epochs()]
    assert min(values) == best["value"]


def test_the_command_goes_on_with_what_it_finds_and_refuses_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(_arguments(tmp_path, *_SMALL, "--trials", "1")) == 0
    assert cli.main(_arguments(tmp_path, *_SMALL)) == 2
    assert f"{tmp_path} holds a study already; go on with it by --resume" in capsys.readouterr().err
    resumed = ["tune", "lr-backprop", "--out", str(tmp_path), "--resume"]
    assert cli.main([*resumed, "--trials", "2"]) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["states"] == {"complete": 2}
    assert cli.main([*resumed, "--epochs", "3"]) == 2
    assert "holds another study: epochs is 2 there and 3 here" in capsys.readouterr().err
    assert cli.main([*resumed, "--no-prune"]) == 2
    assert "warmup is 1 there and 2 here" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_shares_a_study_between_processes(tmp_path: Path) -> None:
    assert cli.main(_arguments(tmp_path, *_SMALL, "--jobs", "2")) == 0
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["states"] == {"complete": 2}


def test_an_interruption_leaves_a_study_that_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Trainer):
        def epochs(self) -> Any:
            for metrics in super().epochs():
                yield metrics
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("jetplane_lab.tuning.objective.Trainer", Interrupted)
        assert cli.main(_arguments(tmp_path, *_SMALL)) == 130
    assert f"jetplane tune lr-backprop --out {tmp_path} --resume goes on with it" in capsys.readouterr().err
    assert cli.main(["tune", "lr-backprop", "--out", str(tmp_path), "--resume"]) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["states"] == {"cut off": 1, "complete": 2}


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_leaves_a_study_that_can_be_resumed(
    number: signal.Signals,
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Signalled(Trainer):
        def epochs(self) -> Any:
            for metrics in super().epochs():
                yield metrics
                signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr("jetplane_lab.tuning.objective.Trainer", Signalled)
        assert cli.main(_arguments(tmp_path, *_SMALL)) == status
    assert f"jetplane tune lr-backprop --out {tmp_path} --resume goes on with it" in capsys.readouterr().err
    with Study(tmp_path, Settings.read(tmp_path / "study.json")) as study:
        assert [entry.state for entry in study.entries] == ["cut off", "waiting"]  # given back, not found dead later


def test_a_run_that_diverges_gets_the_worst_score_and_says_why(digits: Dataset) -> None:
    config = presets.find("lr-backprop").config.replace(dataset="digits", divergence=10.0)
    settings = change(epochs=8, hold_out=500)
    outcome = training_objective(config, settings, digits)(Parameters(1e6, 500), lambda epoch, value: False)
    assert outcome.value == math.inf
    assert outcome.facts["ended"].startswith("diverged in epoch 3")
    assert outcome.facts["epochs"] < 8


def test_a_pruned_trial_stops_training(digits: Dataset) -> None:
    config = presets.find("lr-backprop").config.replace(dataset="digits")
    seen: list[int] = []

    def report(epoch: int, value: float) -> bool:
        seen.append(epoch)
        return epoch == 2

    outcome = training_objective(config, change(epochs=5), digits)(Parameters(0.01, 500), report)
    assert seen == [1, 2]
    assert outcome.facts["epochs"] == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lr-bounds", "0.5", "0.1"], r"lr_bounds is [0.5, 0.1]; expected two positive numbers"),
        (["--lr-bounds", "nan", "0.1"], "is 'nan'; expected a positive number"),
        (["--lr-bounds", "x", "0.1"], "is 'x'; expected a positive number"),
        (["--trials", "0"], "is '0'; expected a positive whole number"),
        (["--seed", "-1"], "is '-1'; expected a whole number"),
        (["--hold-out", "6000"], "hold_out is 6000; expected fewer"),
        (["--sampler", "tpe"], "invalid choice: 'tpe'"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(_arguments(tmp_path, *more))
    except SystemExit as end:
        status = int(str(end.code))
    assert status == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "study.db").exists()


def test_an_unknown_preset_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "lr-fomo"]) == 2
    assert "did you mean lr-fomoh?" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(_arguments(tmp_path, "--device", "cuda")) == 2
    assert "device is 'cuda', but torch finds no CUDA device" in capsys.readouterr().err


def test_workers_that_fail_are_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Study(tmp_path / "study", SETTINGS).close()
    arguments = argparse.Namespace(out=tmp_path / "study", data_dir=tmp_path / "nowhere", jobs=1)
    with pytest.raises(RuntimeError, match="1 of 1 processes failed; --resume goes on with the study"):
        tune._share(arguments, SETTINGS, presets.find("lr-fgd").config)
    assert capfd.readouterr().err.count("nowhere") >= 1
