"""One journal for all processes of a group: the first one keeps it, and all begin where it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import torch

from ..ad.run.parts import is_shared_out
from ..optim import HyperplaneSearch
from ..optim.watching import NOBODY, Moved
from ..parallel.processes import Processes
from .identity import Tracked, tracked
from .optimizer_state import handed_over, put, rates_of, set_numbers, tensors_of
from .reader import holds_journal
from .writer import DIGEST_EVERY, SNAPSHOT_EVERY, Journal, check

__all__ = ["SharedJournal"]

_WHAT = "the beginning of the journal"


class SharedJournal:
    """The journal of an optimizer with a ``process_group``, begun or gone on with; every process makes one.

    The first process keeps the journal in ``path``, with the ``options`` of :class:`Journal`. Where there is one the
    run goes on: the first process replays it, and the others get parameters, buffers, memory, step, learning rates and
    ``place`` from there, however many there are and whatever they held. So a script that is killed in one of its
    processes and started again in all of them (torchrun --max-restarts) loses nothing that was committed, and takes no
    step twice. Without a group it is a journal of one process. A step may be taken wherever ``step`` is.

    Example:
        >>> import tempfile
        >>> from jetplane.optim import FGD
        >>> folder = tempfile.mkdtemp() + "/journal"
        >>> for until in (3, 5):  # the second one goes on
        ...     model = torch.nn.Linear(3, 1)
        ...     opt = FGD(model.parameters(), lr=0.1)
        ...     with SharedJournal(folder, opt, model=model) as journal:
        ...         for step in range(journal.step, until):
        ...             loss = opt.step(lambda: (model(torch.ones(3)) - 1).square().sum())
        >>> journal.step
        5
    """

    def __init__(
        self,
        path: Path | str,
        optimizer: torch.optim.Optimizer,
        *,
        model: torch.nn.Module | None = None,
        **options: Any,
    ) -> None:
        check(optimizer, model)
        assert isinstance(optimizer, HyperplaneSearch)  # others are refused above
        self._optimizer = optimizer
        self._place: Any = None
        self._journal: Journal | None = None
        processes: Processes | None = self._optimizer._crew.processes
        if processes is None:
            self._open(path, model, options)
            return
        of = tracked(optimizer, model)
        wholes = tensors_of(self._optimizer, of)  # of all, before one of them does something that may fail
        with processes.telling(1, _WHAT), handed_over(self._optimizer, wholes):
            said = self._open(path, model, options) if processes.rank == 0 else ""
        said = processes.texts(said, _WHAT)[0]
        if processes.rank:
            numbers, lrs, decays, self._place = json.loads(said)
            size = numbers["size"]
            set_numbers(self._optimizer, numbers | {"size": size and tuple(size)}, lrs, decays)
        if self._journal is not None and self._journal.restored is not None:
            wholes = self._journal.restored
        processes.follow(list(wholes.values()), _WHAT)
        if any(map(is_shared_out, of.leaves)):
            put(self._optimizer, of, wholes)
            if self._journal is None:
                self._optimizer._watcher = _Giving(self._optimizer, of, options)
        if self._journal is not None:
            self._journal.restored = None

    def _open(self, path: Path | str, model: torch.nn.Module | None, options: dict[str, Any]) -> str:
        """Begin the journal or go on with it. Returns where the optimizer stands, but for its tensors."""
        begin = Journal.resume if holds_journal(path) else Journal
        self._journal = begin(path, self._optimizer, model=model, **options)
        return json.dumps([self._optimizer._numbers._asdict(), *rates_of(self._optimizer), self._journal.place])

    @property
    def step(self) -> int:
        """How many steps were taken."""
        return int(self._optimizer._numbers.step)

    @property
    def place(self) -> Any:
        """The place in the order of the data: a plain value, which the first process writes down."""
        return self._place if self._journal is None else self._journal.place

    @place.setter
    def place(self, value: Any) -> None:
        if self._journal is None:
            self._place = value
        else:
            self._journal.place = value

    def commit(self) -> None:
        """Write the records so far, where they are kept."""
        if self._journal is not None:
            self._journal.commit()

    def close(self) -> None:
        """Commit, and let go of the optimizer and the folder."""
        if self._journal is not None:
            self._journal.close()
        elif isinstance(self._optimizer._watcher, _Giving):
            self._optimizer._watcher = NOBODY

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Giving:
    """Watches where another process keeps the journal of parameters that are shared out: gives it the parts here."""

    def __init__(self, optimizer: HyperplaneSearch, of: Tracked, options: dict[str, Any]) -> None:
        self._optimizer, self._of = optimizer, of
        self._every = [options.get("digest_every", DIGEST_EVERY), options.get("snapshot_every", SNAPSHOT_EVERY)]

    def before(self, now: Any) -> None:
        pass

    def after(self, moved: Moved) -> None:
        for every in self._every:
            if moved.after.step % every == 0:
                tensors_of(self._optimizer, self._of)
