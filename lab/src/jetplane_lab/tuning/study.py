"""A study in a folder, shared by processes.

Work is numbered by draws: a study of N trials is the draws 0 to N - 1. Every draw ends exactly once, as complete,
pruned or failed with its ``error``. A trial that was cut off (its process killed or interrupted) is an Optuna trial in
the failed state *without* an ``error``; its draw is entered again with the same parameters. What there is to do is
derived from the trials alone, under one lock, so there is no moment at which a kill loses or doubles a draw.

A worker holds the lock of a file of its own; a running trial whose worker's file is not locked is dead. This needs
neither a heartbeat to go stale nor a process id that may be reused. Every access to the database happens under the
study's lock, since SQLite answers some collisions of writers with an error instead of waiting.
"""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import locks, sampling
from .settings import Settings, write_json

if TYPE_CHECKING:
    import optuna

__all__ = ["Entry", "Objective", "Outcome", "Parameters", "Report", "Study", "run_study"]

_NAME = "study"
_STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}
_KILLS = 3  # a draw whose process was killed so often is given up: it may be what kills it
_STARTUP = 5  # complete trials before the median rule begins


class Parameters(NamedTuple):
    """What a trial tries."""

    lr: float
    batch_size: int


class Outcome(NamedTuple):
    """What a trial gave: its score, to be minimised, and facts for the summary."""

    value: float
    facts: dict[str, Any] = {}  # noqa: RUF012  (never written to)


class Entry(NamedTuple):
    """A trial of a study as it stands on disk."""

    number: int
    draw: int | None  # None: cut off before it began
    state: str  # "complete", "pruned", "failed", "cut off", "running" or "waiting"
    parameters: Parameters | None
    value: float | None  # the score; of a pruned trial the best so far
    facts: dict[str, Any]


Report = Callable[[int, float], bool]  # epoch and score; True: the trial is pruned and should return
Objective = Callable[[Parameters, Report], Outcome]


class Study:
    """The study of ``settings`` in ``folder``: begun, or gone on with if it is there."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        optuna = _optuna()
        self.folder, self.settings = folder, settings
        self._worker: tuple[str, int] | None = None
        _check_kinds(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with self._lock():
            there = self._agree()
            if there is not None:
                self._require_database()
            url = f"sqlite:///{(folder / 'study.db').resolve()}"
            self._storage = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}})
            pruner = optuna.pruners.MedianPruner(n_startup_trials=_STARTUP, n_warmup_steps=settings.warmup + 1)
            self._study = self._begun(pruner) if there is None else self._gone_on(pruner)
            if there is None or there.trials < settings.trials:
                settings.save(folder / "study.json")

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files. A trial that still runs in this process counts as cut off from here on."""
        if self._worker:
            name, handle = self._worker
            self._worker = None
            (self._workers / name).unlink(missing_ok=True)
            os.close(handle)
        self._storage.remove_session()
        self._storage.engine.dispose()

    @property
    def entries(self) -> list[Entry]:
        """All trials, in their order."""
        with self._lock():
            return [_entry(trial) for trial in self._trials()]

    @property
    def best(self) -> Entry | None:
        """The complete trial with the lowest score."""
        scored = [entry for entry in self.entries if entry.state == "complete" and entry.value is not None]
        return min(scored, key=lambda entry: (entry.value, entry.number), default=None)

    def save(self, name: str, value: Any) -> None:
        """Write a JSON file of the study; processes that do so at once write one after the other."""
        with self._lock():
            write_json(self.folder / name, value)

    # -- one trial ------------------------------------------------------------------------------------------------

    def claim(self) -> optuna.Trial | None:
        """The next trial for this process, or None if there is nothing to begin just now."""
        with self._lock():
            self._recover()
            trials = self._trials()
            if not any(trial.state.name == "WAITING" for trial in trials):
                drawn = {trial.user_attrs.get("draw") for trial in trials}
                draw = next((i for i in range(self.settings.trials) if i not in drawn), None)
                if draw is None:
                    return None
                self._study.sampler = sampling.sampler(self.settings, draw)
                if self.settings.sampler == "grid":
                    self._study.enqueue_trial(sampling.grid(self.settings)[draw], user_attrs={"draw": draw})
            trial = self._study.ask(sampling.space(self.settings))
            if "draw" not in trial.user_attrs:
                trial.set_user_attr("draw", draw)
            trial.set_user_attr("worker", self._register())
            return trial

    def finished(self) -> bool:
        """Whether every draw has ended."""
        with self._lock():
            ended = {trial.user_attrs.get("draw") for trial in self._trials() if _ended(trial)}
        return ended.issuperset(range(self.settings.trials))

    def entry(self, trial: optuna.Trial) -> Entry:
        """A trial as it stands on disk."""
        with self._lock():
            return self._read(trial)

    def report(self, trial: optuna.Trial, epoch: int, value: float) -> bool:
        """Enter the score after an epoch; True if the median rule ends the trial."""
        with self._lock():
            trial.report(value if math.isfinite(value) else math.inf, epoch)
            return epoch < self.settings.epochs and trial.should_prune()  # after the last epoch it is complete

    def finish(self, trial: optuna.Trial, outcome: Outcome, pruned: bool = False) -> Entry:
        """Enter what a trial gave. A score that is not finite is entered as infinity: the worst there is."""
        from optuna.trial import TrialState

        value = outcome.value if math.isfinite(outcome.value) else math.inf
        with self._lock():
            trial.set_user_attr("facts", outcome.facts)
            if pruned:
                self._study.tell(trial, state=TrialState.PRUNED)
            else:
                self._study.tell(trial, value)
            return self._read(trial)

    def fail(self, trial: optuna.Trial, error: str) -> Entry:
        """End a trial that cannot be scored, for good."""
        with self._lock():
            trial.set_user_attr("error", error)
            self._tell_failed(trial)
            return self._read(trial)

    def give_back(self, trial: optuna.Trial) -> None:
        """Leave a trial that was interrupted to whoever goes on with the study."""
        with self._lock():
            trial.set_user_attr("interrupted", True)
            self._tell_failed(trial)
            self._recover()

    # -- inside the lock ------------------------------------------------------------------------------------------

    def _agree(self) -> Settings | None:
        """The settings of the study that is there, which are the same; None where there is none."""
        path = self.folder / "study.json"
        if not path.exists():
            return None
        there = Settings.read(path)
        different = self.settings.differs(there)
        if different:
            raise ValueError(f"{self.folder} holds another study: {different}; give the same settings or a new folder")
        return there

    def _require_database(self) -> None:
        """The settings are written after the database: where they are, its trials were there."""
        path = self.folder / "study.db"
        if not path.exists() or path.stat().st_size == 0:
            raise self._lost("is empty" if path.exists() else "is missing")

    def _begun(self, pruner: optuna.pruners.BasePruner) -> optuna.Study:
        study = _optuna().create_study(
            storage=self._storage, pruner=pruner, study_name=_NAME, direction="minimize", load_if_exists=True
        )
        if study.get_trials(deepcopy=False):  # without any, a process was killed before it wrote the settings
            raise ValueError(f"{self.folder} has a study.db but no study.json, so its settings are unknown")
        return study

    def _gone_on(self, pruner: optuna.pruners.BasePruner) -> optuna.Study:
        try:
            return _optuna().load_study(storage=self._storage, pruner=pruner, study_name=_NAME)
        except KeyError:
            raise self._lost("holds no study") from None

    def _lost(self, how: str) -> ValueError:
        return ValueError(
            f"{self.folder / 'study.db'} {how}, though study.json is there: the trials of the study are lost; put the "
            "database back, or begin anew in another folder"
        )

    def _recover(self) -> None:
        """Enter again what was cut off."""
        draws: dict[int, list[optuna.trial.FrozenTrial]] = {}
        for trial in self._trials():
            if "draw" in trial.user_attrs:
                draws.setdefault(trial.user_attrs["draw"], []).append(trial)
            elif trial.state.name == "RUNNING":  # died while it was drawn: the draw is made anew
                self._tell_failed(trial.number)
        for draw, trials in draws.items():
            last = trials[-1]
            if last.state.name == "RUNNING" and not self._works(last):
                kills = 1 + sum("interrupted" not in trial.user_attrs for trial in trials[:-1])
                if kills >= _KILLS:
                    words = f"its process was killed {kills} times"
                    self._storage.set_trial_user_attr(last._trial_id, "error", words)
                    self._tell_failed(last.number)
                    continue
                self._tell_failed(last.number)
            elif not _cut_off(last):
                continue
            parameters = {**last.system_attrs.get("fixed_params", {}), **last.params}
            self._study.enqueue_trial(parameters, user_attrs={"draw": draw})

    def _works(self, trial: optuna.trial.FrozenTrial) -> bool:
        name = trial.user_attrs.get("worker")
        # without a worker it died between its draw and its entry: nobody else can be in between, since we hold the lock
        return name is not None and locks.alive(self._workers / name)

    def _register(self) -> str:
        if self._worker is None:
            self._workers.mkdir(exist_ok=True)
            for path in self._workers.iterdir():
                if not locks.alive(path):
                    path.unlink()
            name = uuid.uuid4().hex
            self._worker = (name, locks.hold(self._workers / name))
        return self._worker[0]

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _read(self, trial: optuna.Trial) -> Entry:
        return _entry(self._trials()[trial.number])

    def _tell_failed(self, trial: optuna.Trial | int) -> None:
        from optuna.trial import TrialState

        self._study.tell(trial, state=TrialState.FAIL)

    @property
    def _workers(self) -> Path:
        return self.folder / ".workers"

    @contextmanager
    def _lock(self) -> Iterator[None]:
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import SQLAlchemyError

        with locks.locked(self.folder / ".lock"):
            try:
                yield
            except (StorageInternalError, SQLAlchemyError) as error:
                cause = getattr(error, "orig", None) or getattr(error.__cause__, "orig", None) or error
                raise OSError(f"{self.folder / 'study.db'} cannot be used: {cause}") from error


def _check_kinds(folder: Path) -> None:
    """Refuse a file where the folder should be, and a directory where a file should be."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; expected a directory for the study")
    for name in ("study.json", "study.db", "summary.json", ".lock"):
        if (folder / name).is_dir():
            raise IsADirectoryError(f"{folder / name} is a directory; expected a file of a study, or nothing")


def run_study(
    study: Study,
    objective: Objective,
    began: Callable[[Entry], None] = lambda entry: None,
    ended: Callable[[Entry], None] = lambda entry: None,
    stop: Callable[[], bool] = lambda: False,
    poll: float = 0.5,
) -> None:
    """Work on the study until all its draws have ended, here or in other processes.

    A process that finds nothing to begin waits for the others, and takes over what they leave if they die. Running out
    of memory fails the trial and the study goes on; any other error gives the trial back and is raised.
    """
    while not stop():
        trial = study.claim()
        if trial is None:
            if study.finished():
                return
            time.sleep(poll)
            continue
        _attempt(study, trial, objective, began, ended)


def _attempt(
    study: Study,
    trial: optuna.Trial,
    objective: Objective,
    began: Callable[[Entry], None],
    ended: Callable[[Entry], None],
) -> None:
    pruned = False

    def report(epoch: int, value: float) -> bool:
        nonlocal pruned
        pruned = study.report(trial, epoch, value)
        return pruned

    start = time.monotonic()
    try:
        began(study.entry(trial))
        outcome = objective(Parameters(**trial.params), report)
    except BaseException as error:
        if _out_of_memory(error):
            ended(study.fail(trial, f"{type(error).__name__}: {_sentence(error)}"))
            return
        study.give_back(trial)
        raise
    facts = {"seconds": round(time.monotonic() - start, 3), **outcome.facts}
    ended(study.finish(trial, Outcome(outcome.value, facts), pruned))


def _entry(trial: optuna.trial.FrozenTrial) -> Entry:
    attributes, state = trial.user_attrs, _STATES[trial.state.name]
    parameters = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
    value = trial.value
    if state == "pruned":  # Optuna's value is the last one; ours the best, as of complete trials
        value = min(trial.intermediate_values.values())
    facts = dict(attributes.get("facts", {}))
    if state == "failed":
        if _cut_off(trial):
            state, facts["ended"] = "cut off", "interrupted" if "interrupted" in attributes else "killed"
        else:
            facts["ended"] = attributes["error"]
    return Entry(
        trial.number,
        attributes.get("draw"),
        state,
        Parameters(**parameters) if len(parameters) == len(Parameters._fields) else None,
        value,
        facts,
    )


def _cut_off(trial: optuna.trial.FrozenTrial) -> bool:
    return trial.state.name == "FAIL" and "error" not in trial.user_attrs


def _ended(trial: optuna.trial.FrozenTrial) -> bool:
    return trial.state.is_finished() and not _cut_off(trial)


def _out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError)


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ImportError(
            "tuning needs optuna, which is not installed: pip install './lab[tune]' in a checkout"
        ) from None
    return optuna
