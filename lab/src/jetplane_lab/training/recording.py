"""The journal of a run: each step's numbers, beside the checkpoints of its epochs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from jetplane import journal
from jetplane.errors import JournalRefused, ReplayDiffers
from jetplane.journal import Journal

from .. import methods

if TYPE_CHECKING:
    from ..methods import Method

__all__ = ["NAME", "Recording"]

NAME = "journal"  # of its folder, within the run's


class Recording:
    """The journal of a run, or of none. A run goes on with the journal that is in its folder."""

    def __init__(self, asked: bool, folder: Path | str | None, method: Method, model: torch.nn.Module) -> None:
        if asked and folder is None:
            raise JournalRefused("a journal was asked for and the run has no folder; expected one to write it to.")
        path = None if folder is None else Path(folder) / NAME
        self._path = path if path is not None and (asked or journal.holds_journal(path)) else None
        self._method, self._model = method, model
        self._journal: Journal | None = None
        if self._path is not None:
            journal.check(methods.scheduled(method), model)

    def begin(self) -> None:
        """Begin the journal, or go on with it where the checkpoint is: what is behind is trained again."""
        if self._path is None:
            return
        optimizer, model = methods.scheduled(self._method), self._model
        if not journal.holds_journal(self._path):
            self._journal = Journal(self._path, optimizer, model=model)
            return
        state = copy.deepcopy(self._method.state_dict())
        before = copy.deepcopy(model.state_dict())
        step = int(optimizer.param_groups[0]["step"])
        self._journal = Journal.resume(self._path, optimizer, model=model, step=step)
        if not all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()):
            self.close()
            raise ReplayDiffers(
                f"{self._path} leads to other parameters after {step} steps than the checkpoint holds; move it away to "
                "go on without it, or begin anew with --fresh."
            )
        self._method.load_state_dict(state)  # a schedule may have set the next epoch's rate

    def at(self, epoch: int, batch: int) -> None:
        """Where the next step is in the order of the data."""
        if self._journal is not None:
            self._journal.place = {"epoch": epoch, "batch": batch}

    def commit(self) -> None:
        """Flush all steps so far to the disk, as before a checkpoint that relies on them."""
        if self._journal is not None:
            self._journal.commit()

    def close(self) -> None:
        """Let go of the journal."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None
