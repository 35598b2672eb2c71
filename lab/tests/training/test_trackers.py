"""Trackers: what they write is read back with the packages' own readers, and they never harm a run."""

from __future__ import annotations

import dataclasses
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jetplane_lab import trackers
from jetplane_lab.data import load
from jetplane_lab.training import Config, Metrics, Summary, Trainer
from jetplane_lab.training.batches import Resident, place

CONFIG = Config(
    model="logistic-regression", method="fomoh", lr=0.2, batch_size=2000, epochs=3, dataset="digits", device="cpu"
)


@pytest.fixture(scope="module")
def digits() -> Resident:
    return place(load("digits"), CONFIG)


def train(folder: Path, digits: Resident, tracker: Any) -> Trainer:
    run = Trainer(CONFIG, digits, folder, callbacks=[tracker])
    run.fit()
    return run


def numbers(metrics: Metrics) -> dict[str, float]:
    """Fields of an epoch that every tracker has to show; float32 in TensorBoard."""
    return {
        field.name: getattr(metrics, field.name)
        for field in dataclasses.fields(metrics)
        if isinstance(getattr(metrics, field.name), int | float)
    }


# -- TensorBoard --------------------------------------------------------------------------------------------------


def _events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard_holds_every_number_and_the_hyper_parameters(tmp_path: Path, digits: Resident) -> None:
    pytest.importorskip("tensorboard")
    run = train(tmp_path, digits, trackers.make("tensorboard", tmp_path, CONFIG))
    events = _events(tmp_path)
    for metrics in run.history:
        for name, value in numbers(metrics).items():
            found = {event.step: event.value for event in events.Scalars(name)}
            assert found[metrics.epoch] == pytest.approx(value, rel=1e-6), name
    assert [event.step for event in events.Scalars("validation_nll")] == [1, 2, 3]
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    data = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    values = HParamsPluginData.FromString(data).session_start_info.hparams
    assert values["lr"].number_value == 0.2
    assert values["method"].string_value == "fomoh"
    assert set(values) == {field.name for field in dataclasses.fields(CONFIG)}


def test_tensorboard_of_a_resumed_run_shows_each_epoch_once(tmp_path: Path, digits: Resident) -> None:
    pytest.importorskip("tensorboard")

    class StopAfterOne(trackers.Callback):
        def epoch(self, run: Trainer, metrics: Metrics) -> None:
            run.stop.by = "the test"

    tracker = trackers.make("tensorboard", tmp_path, CONFIG)
    first = Trainer(CONFIG, digits, tmp_path, callbacks=[tracker, StopAfterOne()])
    for _ in first.epochs():
        pass
    assert first.epoch == 1
    tracker.begin(first)  # an epoch that was logged but is trained again, for the checkpoint did not have it
    tracker.epoch(first, dataclasses.replace(first.history[-1], epoch=2, validation_nll=99.0))
    assert first.summary is not None
    tracker.end(first, first.summary)
    second = train(tmp_path, digits, trackers.make("tensorboard", tmp_path, CONFIG))
    found = [(event.step, event.value) for event in _events(tmp_path).Scalars("validation_nll")]
    assert found == [(m.epoch, pytest.approx(m.validation_nll, rel=1e-6)) for m in second.history]


# -- Weights & Biases ---------------------------------------------------------------------------------------------


def _records(path: Path) -> Iterator[bytes]:
    """The records of a file in the format of LevelDB's log, after W&B's header of 7 bytes."""
    data, at, block, whole = path.read_bytes(), 7, 32768, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if block - at % block < 7:  # the rest of a block that has no room for a record's header
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)  # after the checksum
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def test_wandb_works_offline_without_an_account(
    tmp_path: Path, digits: Resident, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    run = train(tmp_path, digits, trackers.make("wandb", tmp_path, CONFIG))
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 30  # W&B's own process writes the file, also after the run has finished
    kinds: list[str] = []
    while "exit" not in kinds and time.monotonic() < deadline:
        time.sleep(0.1)
        records = [wandb_internal_pb2.Record.FromString(data) for data in _records(path)]
        kinds = [record.WhichOneof("record_type") for record in records]
    rows: list[dict[str, str]] = []
    config: dict[str, str] = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): item.value_json for item in items})
        elif record.WhichOneof("record_type") == "run":
            config |= {item.key: item.value_json for item in record.run.config.update}
    assert config["lr"] == "0.2"
    assert config["method"] == '"fomoh"'
    assert len(rows) == 3
    for row, metrics in zip(rows, run.history, strict=True):
        assert int(row["_step"]) == metrics.epoch
        for name, value in numbers(metrics).items():
            assert float(row[name]) == pytest.approx(value), name


# -- MLflow -------------------------------------------------------------------------------------------------------


def test_mlflow_writes_into_the_runs_folder_and_goes_on_with_a_run(
    tmp_path: Path, digits: Resident, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = train(tmp_path, digits, trackers.make("mlflow", tmp_path, CONFIG))
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("jetplane")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["lr"] == "0.2"
    assert found.data.params["method"] == "fomoh"
    for name, value in numbers(run.history[-1]).items():
        history = {entry.step: entry.value for entry in client.get_metric_history(found.info.run_id, name)}
        assert history[3] == pytest.approx(value), name
        assert sorted(history) == ([3] if name.endswith("_after") else [1, 2, 3])  # evaluated after the last alone
    tracker = trackers.make("mlflow", tmp_path, CONFIG)
    tracker.begin(run)
    tracker.epoch(run, dataclasses.replace(run.history[-1], epoch=4))
    assert run.summary is not None
    tracker.end(run, dataclasses.replace(run.summary, reason="diverged"))
    (again,) = client.search_runs([experiment.experiment_id])
    assert again.info.run_id == found.info.run_id
    assert again.info.status == "FAILED"
    assert len(client.get_metric_history(found.info.run_id, "lr")) == 4


# -- what can go wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_an_absent_package_is_named_with_its_extra(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (name, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    message = rf"the {name} tracker cannot be used \(.*\): pip install '\./lab\[{name}\]' in a checkout"
    with pytest.raises(ImportError, match=message):
        trackers.make(name, tmp_path, CONFIG)


def test_an_unknown_tracker_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tracker is 'tensorbord'; did you mean tensorboard\?"):
        trackers.make("tensorbord", tmp_path, CONFIG)


class Faulty:
    """Fails in one of its methods."""

    calls: list[str]

    def __init__(self, when: str) -> None:
        self.when, self.calls = when, []

    def open(self, folder: Path, config: Config, trained: int) -> Faulty:
        self._call("open")
        return self

    def log(self, epoch: int, numbers: dict[str, float]) -> None:
        self._call("log")

    def close(self, reason: str, numbers: dict[str, float]) -> None:
        self._call("close")

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if what == self.when:
            raise OSError("the disk\nis full")


@pytest.mark.parametrize(
    ("when", "calls"),
    [("open", ["open"]), ("log", ["open", "log"]), ("close", ["open", "log", "log", "log", "close"])],
)
def test_a_tracker_that_fails_warns_once_and_the_run_goes_on(
    tmp_path: Path, digits: Resident, when: str, calls: list[str]
) -> None:
    faulty = Faulty(when)
    tracker = trackers.Tracker("faulty", tmp_path, CONFIG, faulty.open)
    message = "the faulty tracker failed and is left out from here on: the disk is full"
    with pytest.warns(UserWarning, match=message) as warned:
        run = train(tmp_path, digits, tracker)
    assert len(warned) == 1
    assert run.summary is not None and run.summary.reason == "finished"
    assert faulty.calls == calls


def test_an_interruption_is_not_taken_for_a_failure(tmp_path: Path, digits: Resident) -> None:
    def interrupted(folder: Path, config: Config, trained: int) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, digits, trackers.Tracker("interrupted", tmp_path, CONFIG, interrupted))


def test_only_what_is_a_number_is_logged_and_a_dictionary_gives_its_name(digits: Resident) -> None:
    metrics = next(iter(Trainer(CONFIG, digits).epochs()))
    made = trackers._numbers(dataclasses.replace(metrics, not_taken={"SINGULAR": 2}))
    assert made == {**numbers(metrics), "not_taken/SINGULAR": 2}
    assert "train_nll_after" not in made  # None: it was not measured
    summary = Summary("finished", "", 1, None, 0.5, None, 7, 3.0, 1.0, 1.0, 9, "resident set")
    made = trackers._numbers(summary)
    assert made["parameters"] == 7
    assert not {"reason", "message", "final", "best_validation_accuracy"} & set(made)
