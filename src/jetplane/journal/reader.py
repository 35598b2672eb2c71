"""What lies in a journal's folder, and any step's parameters from it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import JournalDamaged, JournalRefused, ReplayDiffers
from . import durable, identity, snapshots
from .frames import FramedBytes, Frames, scan
from .retake import Replica
from .step_record import StepRecord, decode

__all__ = ["JournalRun", "Verified", "export", "holds_journal", "opened", "remove", "replay", "verify"]

FILE = "steps.journal"


class Verified(NamedTuple):
    """What a replay of a whole run was compared with."""

    steps: int
    digests: int  # checksums of the parameters in records
    snapshots: int  # snapshots, bit by bit


def holds_journal(folder: Path | str) -> bool:
    """Whether a folder holds a journal."""
    return (Path(folder) / FILE).exists()


@dataclass(frozen=True)
class JournalRun:
    """A journal as it lies on the disk."""

    folder: Path
    header: dict[str, Any]
    frames: Frames

    @property
    def path(self) -> Path:
        return self.folder / FILE

    @property
    def first(self) -> int:
        """How many steps were taken before the first record."""
        return int(self.header["first"])

    @property
    def last(self) -> int:
        """How many steps were taken at the last record."""
        return self.first + len(self.frames.records)

    def frame(self, step: int) -> FramedBytes:
        """The frame after which so many steps are taken."""
        return self.frames.records[step - self.first - 1] if step > self.first else self.frames.header

    def records(self, start: int, stop: int) -> Iterator[StepRecord]:
        """The records of the steps from number ``start`` to ``stop`` - 1."""
        for frame in self.frames.records[start - self.first : stop - self.first]:
            yield decode(frame.body)

    def check(self, step: int) -> int:
        """The number of steps, where the journal knows of them."""
        if not self.first <= step <= self.last:
            raise JournalRefused(
                f"step is {step}, and the journal in {self.folder} goes from {self.first} to {self.last}; expected a "
                "number of steps within."
            )
        return step

    def check_here(self, device: torch.device) -> None:
        """Raise where these versions, or this device, make other updates than those of the run."""
        identity.compare(self.header, {**identity.versions(), "update": identity.update_form([device.type])}, self.path)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise JournalRefused(f"the run of {self.path} was on cuda, and torch sees no such device here.")

    def replica(self, step: int, device: torch.device | None = None, start: Path | str | None = None) -> Replica:
        """Parameters, buffers and memory after so many steps, from a snapshot, or from where the run began."""
        self.check(step)
        device = torch.device(self.header["update"].rpartition(" ")[2]) if device is None else device
        self.check_here(device)
        replica = Replica(self.header, device)
        if start is None:
            self._stand(replica, step)
        else:
            replica.begin(snapshots.read(Path(start))[0], start)
        replica.take_all(self.records(replica.step, step))
        return replica

    def _stand(self, replica: Replica, most: int) -> None:
        """Stand where the newest good snapshot up to a step does."""
        troubles = []
        for step in reversed(snapshots.steps_of(self.folder)):
            if self.first <= step <= most:
                try:
                    self.stand(replica, step)
                except JournalDamaged as error:
                    troubles.append(str(error))
                    continue
                for trouble in troubles:
                    warnings.warn(f"{trouble} Going on from the snapshot after step {step}.", stacklevel=4)
                return
        found = " ".join(troubles) or f"There are none up to step {most}."
        raise JournalDamaged(f"no snapshot in {self.folder} is good: {found} Expected one to begin with.")

    def stand(self, replica: Replica, step: int) -> None:
        """Stand where the snapshot after this step does."""
        path = snapshots.path_of(self.folder, step)
        state, tensors = snapshots.standing(path)
        if (state.run, state.step, state.chain) != (self.header["run"], step, self.frame(step).crc):
            raise JournalDamaged(f"{path} is no snapshot of this journal's step {step}.")
        replica.stand(state, tensors)


def opened(folder: Path | str) -> JournalRun:
    """The journal in a folder; what a crash has torn off its end is left out."""
    folder = Path(folder)
    path = folder / FILE
    if not path.exists():
        raise JournalRefused(f"{folder} holds no journal; expected a folder with a file {FILE}.")
    frames = scan(path.read_bytes(), path)
    return JournalRun(folder, json.loads(frames.header.body), frames)


def remove(folder: Path | str) -> None:
    """Remove the journal in a folder and its snapshots, and nothing else."""
    folder = Path(folder)
    if folder.exists():
        durable.remove([folder / FILE])  # first: without it the others are no journal
        durable.remove([snapshots.path_of(folder, step) for step in snapshots.steps_of(folder)])
        durable.tidy(folder)


def replay(folder: Path | str, step: int | None = None, start: Path | str | None = None) -> dict[str, torch.Tensor]:
    """Parameters and buffers by their names, as they were after so many steps; None: after the last one.

    Bit by bit those of the training, from the newest snapshot before and the records behind it, without data, model or
    closure. ``start`` is a safetensors file of what the run began with, where there are no snapshots: so a fine-tune of
    a model that others have is its records alone.
    """
    journal = opened(folder)
    return journal.replica(journal.last if step is None else step, start=start).exported


def export(folder: Path | str, path: Path | str, step: int | None = None, start: Path | str | None = None) -> int:
    """Write what :func:`replay` gives as safetensors. Returns the number of steps that were taken."""
    journal = opened(folder)
    replica = journal.replica(journal.last if step is None else step, start=start)
    snapshots.export(replica.exported, Path(path), replica.step)
    return replica.step


def verify(folder: Path | str, start: Path | str | None = None) -> Verified:
    """Replay a run from its first snapshot, or ``start``, and compare with all it holds; raises where they differ."""
    journal = opened(folder)
    steps = [step for step in snapshots.steps_of(journal.folder) if journal.first < step <= journal.last]
    replica = journal.replica(journal.first, start=start)
    digests = 0
    for step in [*steps, journal.last]:
        records = list(journal.records(replica.step, step))
        replica.take_all(records)
        digests += sum(record.digest is not None for record in records)
        if step in steps:
            _compare(journal, replica, step)
    return Verified(journal.last - journal.first, digests, len(steps))


def _compare(journal: JournalRun, replica: Replica, step: int) -> None:
    path = snapshots.path_of(journal.folder, step)
    other = Replica(journal.header, replica.leaves[0].device)
    journal.stand(other, step)
    for (name, ours), theirs in zip(replica.named.items(), other.named.values(), strict=True):
        if snapshots.bits(ours) != snapshots.bits(theirs):
            raise ReplayDiffers(f"{path} has other numbers for {name} than the replay of {step} steps.")
