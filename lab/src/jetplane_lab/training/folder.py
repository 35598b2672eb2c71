"""A run's folder: who may write there, what lies there, and how a run that was cut off is picked up again."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jetplane import journal
from jetplane.errors import JetplaneError

from ..config import Config
from . import checkpoint
from . import durable as files
from .checkpoint import Damaged, State
from .metrics import Metrics, Summary
from .recording import NAME as JOURNAL

__all__ = ["Folder", "InUse", "holds_run"]

CONFIG, ENVIRONMENT, METRICS, SUMMARY, LOCK = (
    "config.json",
    "environment.json",
    "metrics.jsonl",
    "summary.json",
    "lock",
)
CHECKPOINT, PREVIOUS = "checkpoint.safetensors", "checkpoint-previous.safetensors"
_OURS = (CONFIG, ENVIRONMENT, METRICS, SUMMARY, CHECKPOINT, PREVIOUS)


class InUse(JetplaneError, RuntimeError):
    """Another process trains in the folder."""


def holds_run(path: Path) -> bool:
    """Whether there is anything of a run in the folder."""
    return any((path / name).exists() for name in (CONFIG, METRICS, CHECKPOINT, PREVIOUS))


class Folder:
    """The folder of one run, held by this process from `acquire` to `release`.

    ``warn`` is told, in a sentence, of every damage that could be repaired.
    """

    def __init__(self, path: Path, config: Config, warn: Callable[[str], None]) -> None:
        checkpoint.require_safetensors()
        self.path, self.config, self._warn = path, config, warn
        self._held: weakref.finalize[[int], Folder] | None = None  # closes the lock's file, at the latest with this
        self._size, self._lines, self._sha = 0, 0, hashlib.sha256()  # of metrics.jsonl

    # -- the lock ---------------------------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Hold the folder; it is made if it is not there. Holding it twice is holding it."""
        if self._held is not None and self._held.alive:
            return
        self._check_kinds()
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            owner = os.pread(handle, 32, 0).decode(errors="replace") or "unknown"
            os.close(handle)
            raise InUse(f"run folder {self.path} is in use by process {owner}.") from None
        except BaseException:
            os.close(handle)
            raise
        self._held = weakref.finalize(self, os.close, handle)

    def _check_kinds(self) -> None:
        """Refuse a file where the folder should be, and a directory where a file should be."""
        above = next((path for path in (self.path, *self.path.parents) if path.exists()), None)
        if above is not None and not above.is_dir():
            raise NotADirectoryError(f"{above} is a file; expected a directory, in which the run {self.path} is kept.")
        for name in (*_OURS, LOCK):
            if (self.path / name).is_dir():
                raise IsADirectoryError(f"{self.path / name} is a directory; expected a file of a run, or nothing.")

    def release(self) -> None:
        """Let other processes have the folder."""
        if self._held is not None:
            self._held()

    # -- beginning and going on -------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove the files of a run, and nothing else."""
        self.acquire()
        for name in _OURS:
            (self.path / name).unlink(missing_ok=True)
        journal.remove(self.path / JOURNAL)
        self._clean()

    def open(self, environment: dict[str, object]) -> State | None:
        """The state to go on from, with metrics.jsonl cut to its epochs; None where the run begins."""
        self.acquire()
        self._clean()
        self._check_config()
        state = self._last_good()
        if state is None:
            files.replace(self.path / CONFIG, self.config.to_json().encode())  # first: it says whose the others are
            files.replace(self.path / ENVIRONMENT, (json.dumps(environment, indent=1) + "\n").encode())
            self._cut(0)
        else:
            self._cut(state.metrics_size)
            self._lines = state.metrics_lines
            self._compare(environment)
        return state

    def _compare(self, now: dict[str, object]) -> None:
        """Warn where the numbers may differ from here on: the same operations may be rounded differently."""
        path = self.path / ENVIRONMENT
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            self._warn(f"{path} cannot be read ({error}), so the environment is not compared with the one before.")
            return
        for name in ("jetplane", "commit", "torch", "cuda", "device", "threads", "data"):
            if before.get(name) != now[name]:
                self._warn(
                    f"{self.path} was begun with {name} {before.get(name)} and goes on with {now[name]}: "
                    "it need not be, bit for bit, the run that it would have been."
                )

    def _clean(self) -> None:
        """Remove what a process that was killed had begun to write."""
        for name in _OURS:
            (self.path / (name + files.TEMPORARY)).unlink(missing_ok=True)

    def _check_config(self) -> None:
        path = self.path / CONFIG
        if not path.exists():
            if holds_run(self.path):
                raise Damaged(
                    f"{path} is missing though there is a run in the folder; put it back, or begin anew with --fresh."
                )
            return
        try:
            found = Config.from_json(path.read_text(encoding="utf-8"))
        except ValueError as error:  # JSON's and Unicode's errors are ValueErrors
            raise Damaged(f"{path} is damaged ({error}); put it back, or begin anew with --fresh.") from error
        name = self.config.difference(found)
        if name is not None:
            there, here = found.to_dict()[name], self.config.to_dict()[name]
            raise ValueError(
                f"{self.path} holds a run with {name} {there!r}, but {here!r} was asked for; expected the same, "
                "another folder, or --fresh."
            )

    def _last_good(self) -> State | None:
        """The newest state that is whole together with its metrics."""
        found = [self.path / name for name in (CHECKPOINT, PREVIOUS) if (self.path / name).exists()]
        troubles: list[str] = []
        for path in found:
            try:
                state = checkpoint.load(path)
                self._check(path, state)
            except Damaged as error:
                troubles.append(str(error).rstrip("."))
                continue
            for trouble in troubles:
                self._warn(f"{trouble}; going on from {path.name}, after epoch {state.epoch}.")
            if troubles:  # before the next checkpoint would make the damaged one the spare
                os.replace(path, self.path / CHECKPOINT)
                files.sync_folder(self.path)
            return state
        if troubles:
            raise Damaged(
                f"{'; '.join(troubles)}. There is nothing to go on from: put a good copy back, or begin anew with "
                "--fresh."
            )
        return None

    def _check(self, path: Path, state: State) -> None:
        if state.config != self.config.digest():
            raise Damaged(f"{path} belongs to another config than {CONFIG}")
        metrics = self.path / METRICS
        head = b""
        if metrics.exists():
            with metrics.open("rb") as file:
                head = file.read(state.metrics_size)
        if hashlib.sha256(head).hexdigest() != state.metrics_sha256:
            raise Damaged(
                f"{metrics} is damaged: its first {state.metrics_size} bytes are not those of the "
                f"{state.metrics_lines} epochs that {path.name} knows of"
            )

    def _cut(self, size: int) -> None:
        """Drop what was written to metrics.jsonl after the checkpoint: those epochs are trained again."""
        path = self.path / METRICS
        with files.explained(path), path.open("ab") as file:
            file.truncate(size)
            file.flush()
            os.fsync(file.fileno())
        self._size, self._sha = size, hashlib.sha256(path.read_bytes())

    # -- writing ----------------------------------------------------------------------------------------------------

    def append(self, metrics: Metrics) -> None:
        """Write the line of an epoch. It is on the disk, for good, with the next checkpoint."""
        line = (metrics.to_json() + "\n").encode()
        path = self.path / METRICS
        with files.explained(path), path.open("ab") as file:
            file.write(line)
        self._size, self._lines = self._size + len(line), self._lines + 1
        self._sha.update(line)

    def metrics_state(self) -> dict[str, Any]:
        """What a checkpoint notes of metrics.jsonl."""
        return {
            "metrics_size": self._size,
            "metrics_lines": self._lines,
            "metrics_sha256": self._sha.copy().hexdigest(),
        }

    def save(self, state: State) -> None:
        """Write a checkpoint; the one before is kept."""
        with (self.path / METRICS).open("ab") as file:  # the lines first: the checkpoint relies on them
            os.fsync(file.fileno())
        files.replace(self.path / CHECKPOINT, checkpoint.dump(state), keep=self.path / PREVIOUS)

    def finish(self, summary: Summary) -> None:
        """Write the summary."""
        files.replace(self.path / SUMMARY, summary.to_json().encode())

    # -- reading ----------------------------------------------------------------------------------------------------

    def metrics(self) -> list[Metrics]:
        """The metrics of all epochs so far."""
        path = self.path / METRICS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [Metrics.from_json(line) for line in lines]
