"""TensorBoard, Weights & Biases and MLflow as callbacks of a run, none of them required.

Every epoch's numbers are logged under their names in `Metrics`, with the epoch as the step, and the config as the
hyper-parameters. A run that is resumed goes on under the same entry. Nothing leaves the machine unless the environment
asks for it: Weights & Biases stays offline without ``WANDB_API_KEY`` or ``WANDB_MODE``, and MLflow writes into the
run's folder without ``MLFLOW_TRACKING_URI``.

A tracker that fails never ends a run: it warns once and is left out from there on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from .config import choice
from .training import Callback, Config, Metrics, Summary, Trainer

__all__ = ["TRACKERS", "Tracker", "make"]


class Sink(Protocol):
    """Where numbers go."""

    def log(self, epoch: int, numbers: dict[str, float]) -> None:
        """Enter the numbers of an epoch."""

    def close(self, reason: str, numbers: dict[str, float]) -> None:
        """Enter why the run ended and its last numbers, and write everything."""


Open = Callable[[Path, Config, int], Sink]  # folder, config, epochs that were trained before


class Tracker(Callback):
    """Hands the numbers of a run to a sink, and keeps the sink's failures away from the run."""

    def __init__(self, name: str, folder: Path, config: Config, open_sink: Open) -> None:
        self.name, self.folder, self.config = name, Path(folder), config
        self._open = open_sink
        self._sink: Sink | None = None

    def begin(self, run: Trainer) -> None:
        """Open the sink."""
        with _Guard(self):
            self._sink = self._open(self.folder, self.config, run.epoch)

    def epoch(self, run: Trainer, metrics: Metrics) -> None:
        """Log an epoch."""
        if self._sink is not None:
            with _Guard(self):
                self._sink.log(metrics.epoch, _numbers(metrics))

    def end(self, run: Trainer, summary: Summary) -> None:
        """Close the sink."""
        sink, self._sink = self._sink, None
        if sink is not None:
            with _Guard(self):
                # the last epoch was logged as such
                sink.close(summary.reason, _numbers(dataclasses.replace(summary, final=None)))

    def drop(self, error: Exception) -> None:
        """Leave the sink out from here on."""
        self._sink = None
        words = " ".join(str(error).split()) or type(error).__name__
        warnings.warn(f"the {self.name} tracker failed and is left out from here on: {words}", stacklevel=2)


class _Guard:
    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):  # none, or an interruption by the user
            return False
        self.tracker.drop(error)
        return True


def make(name: str, folder: Path, config: Config) -> Callback:
    """The tracker of a name, for the run of ``config`` in ``folder``: ``tensorboard``, ``wandb`` or ``mlflow``."""
    open_sink = TRACKERS[choice("tracker", name, TRACKERS)]
    try:
        _import(name)
    except ImportError as error:
        raise ImportError(
            f"the {name} tracker cannot be used ({error}): pip install './lab[{name}]' in a checkout"
        ) from None
    return Tracker(name, folder, config, open_sink)


# -- sinks --------------------------------------------------------------------------------------------------------


class _TensorBoard:
    def __init__(self, folder: Path, config: Config, trained: int) -> None:
        board = _import("tensorboard")
        # what an interrupted run logged beyond its last checkpoint is logged again
        purge = trained + 1 if trained else None
        self.writer = board.SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        if not trained:
            fields = {name: str(value) if value is None else value for name, value in config.to_dict().items()}
            # not add_hparams: it would open a second run beside this one
            for entry in board.summary.hparams(fields, {"validation_nll": None, "validation_accuracy": None}):
                self.writer.file_writer.add_summary(entry)

    def log(self, epoch: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, epoch)
        self.writer.flush()

    def close(self, reason: str, numbers: dict[str, float]) -> None:
        self.writer.add_text("end", reason)
        self.writer.close()


class _WandB:
    def __init__(self, folder: Path, config: Config, trained: int) -> None:
        wandb = _import("wandb")
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jetplane"),
            name=folder.name,
            id=_identity(folder, config),
            resume=None if mode == "offline" else "allow",  # an offline run cannot know what was synced
            reinit="create_new",  # several runs may train together
            dir=str(folder),
            config=config.to_dict(),
            mode=mode,
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, epoch: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=epoch)

    def close(self, reason: str, numbers: dict[str, float]) -> None:
        self.run.summary.update({"reason": reason, **numbers})
        self.run.finish(exit_code=1 if reason == "diverged" else 0)


class _MLflow:
    def __init__(self, folder: Path, config: Config, trained: int) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (folder / "mlruns").resolve().as_uri()
            # MLflow 3 wants to be asked for its file store; the others need packages that mlflow-skinny does not have
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow = _import("mlflow")
        self.client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = self.client.get_experiment_by_name("jetplane")
        number = experiment.experiment_id if experiment else self.client.create_experiment("jetplane")
        identity = _identity(folder, config)
        earlier = self.client.search_runs([number], f"tags.`jetplane.run` = '{identity}'", max_results=1)
        if earlier:
            self.id = earlier[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
        else:
            tags = {"jetplane.run": identity}
            self.id = self.client.create_run(number, run_name=folder.name, tags=tags).info.run_id
            for name, value in config.to_dict().items():
                self.client.log_param(self.id, name, value)

    def log(self, epoch: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.client.log_metric(self.id, name, value, step=epoch)

    def close(self, reason: str, numbers: dict[str, float]) -> None:
        self.client.set_tag(self.id, "jetplane.reason", reason)
        status = {"finished": "FINISHED", "interrupted": "KILLED"}.get(reason, "FAILED")
        self.client.set_terminated(self.id, status)


TRACKERS: dict[str, Open] = {"tensorboard": _TensorBoard, "wandb": _WandB, "mlflow": _MLflow}


_MODULES = {"tensorboard": "torch.utils.tensorboard"}  # where it is not the name itself


def _import(name: str) -> Any:
    return importlib.import_module(_MODULES.get(name, name))


def _numbers(record: Metrics | Summary) -> dict[str, float]:
    """The fields that are numbers, by name; those of a field that is a dict under ``field/name``."""
    found: dict[str, float] = {}
    for name, value in dataclasses.asdict(record).items():
        inner = {f"{name}/{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        found |= {key: v for key, v in inner.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return found


def _identity(folder: Path, config: Config) -> str:
    return hashlib.sha256(f"{folder.resolve()}\n{config.digest()}".encode()).hexdigest()[:16]
