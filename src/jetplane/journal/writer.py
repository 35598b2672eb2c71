"""The journal of an optimizer: a record of every step, and snapshots from time to time."""

from __future__ import annotations

import contextlib
import json
import operator
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..ad.run.parts import own
from ..errors import JournalRefused
from ..optim import HyperplaneSearch
from ..optim.moving import check_whole
from ..optim.watching import NOBODY, Moved
from . import durable, snapshots
from .frames import begin, enframed, scan
from .identity import Tracked, compare, identity, machine, tracked
from .optimizer_state import handed_over, put, rates_of, set_numbers, tensors_of
from .raw_bytes import bytes_of, digest
from .reader import FILE, holds_journal, opened
from .retake import Replica
from .snapshots import Standing
from .step_record import StepRecord, encode

__all__ = ["DIGEST_EVERY", "SNAPSHOT_EVERY", "Journal", "check"]

SNAPSHOT_EVERY, DIGEST_EVERY = 1000, 100  # steps, unless told otherwise

_PARTS = ("directions", "curvature", "solver", "samples", "clip", "maximize", "accept", "compile")


def check(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None = None) -> None:
    """Raise where there can be no journal of an optimizer's steps, before anything is written."""
    snapshots.require()
    identity(optimizer, tracked(optimizer, model))


class Journal:
    """Writes down each step of an optimizer as the few numbers that it is made of, so that no step is lost.

    A record holds seed, step, coefficients, learning rates, status, loss, the ``place`` in the data where one is
    given, and the buffers of ``model`` that the step changed. With the newest snapshot before it, that is every
    parameter, bit by bit: :func:`replay`. Records are written and flushed to the disk ``commit_every`` steps at a time;
    after a crash the run itself takes the steps behind the last commit again. Every ``snapshot_every`` steps all
    tensors are written as safetensors, of which the first and the ``keep`` newest stay (None: all). Every
    ``digest_every`` steps a record has a checksum of the tensors, by which a replay knows that it is right.

    The steps must be functions of seeds and coefficients: an optimizer whose directions are not (`FoMoHBP`), or that is
    no `HyperplaneSearch` is refused. With ``compile`` the passes are compiled, and the update is made as it is.
    ``model`` gives parameters their names; without it no buffers are written down, nor restored.

    Example:
        >>> import tempfile
        >>> from jetplane.journal import replay
        >>> from jetplane.optim import FGD
        >>> model, folder = torch.nn.Linear(3, 1), tempfile.mkdtemp()
        >>> opt = FGD(model.parameters(), lr=0.1, k=2)
        >>> with Journal(folder, opt, model=model) as journal:
        ...     for step in range(5):
        ...         loss = opt.step(lambda: (model(torch.ones(3)) - 1).square().sum())
        >>> assert torch.equal(replay(folder)["weight"], model.weight)
    """

    restored: dict[str, Tensor] | None  # all that a replay gave, whole, until it is taken
    _pending: list[bytes]  # frames that are not written yet
    _chain: int  # CRC of the last one
    _end: int  # of the file
    _place: Any
    _broken: str | None  # why there can be no further step
    _parts: list[Any]  # of the optimizer
    _started: list[int] | None  # versions of the parameters before the step that is under way

    def __init__(
        self,
        path: Path | str,
        optimizer: torch.optim.Optimizer,
        *,
        model: torch.nn.Module | None = None,
        snapshot_every: int = SNAPSHOT_EVERY,
        commit_every: int = 1,
        digest_every: int = DIGEST_EVERY,
        keep: int | None = 2,
    ) -> None:
        options = snapshot_every, commit_every, digest_every, keep
        self._prepare(Path(path), optimizer, model, *options)
        self.path.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if holds_journal(self.path):
                raise JournalRefused(
                    f"{self.path} holds a journal already; expected another folder, or Journal.resume to go on with it."
                )
            self._begin()
            self._attach()

    @classmethod
    def resume(
        cls,
        path: Path | str,
        optimizer: torch.optim.Optimizer,
        *,
        model: torch.nn.Module | None = None,
        step: int | None = None,
        snapshot_every: int = SNAPSHOT_EVERY,
        commit_every: int = 1,
        digest_every: int = DIGEST_EVERY,
        keep: int | None = 2,
    ) -> Self:
        """Go on with a journal: the optimizer, made as it was, stands where the last good record left it.

        Parameters, buffers, what directions remember, step, learning rates and the solver's state are those after
        that step, and ``place`` is what was given with it. With ``step`` the run goes on after so many steps, and the
        records behind are dropped. What belongs to another run is refused with what differs.
        """
        self = cls.__new__(cls)
        self._prepare(Path(path), optimizer, model, snapshot_every, commit_every, digest_every, keep)
        if not holds_journal(self.path):
            raise JournalRefused(f"{self.path} holds no journal; expected Journal(path, optimizer) to begin one.")
        with self._locked():
            self._go_on(step)
            self._attach()
        return self

    # -- for the training loop --------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """How many steps were taken."""
        return self._step

    @property
    def place(self) -> Any:
        """The place in the order of the data: any plain value, which is written down with the next steps."""
        return self._place

    @place.setter
    def place(self, value: Any) -> None:
        try:
            plain = json.loads(json.dumps(value))
        except (TypeError, ValueError) as error:
            raise TypeError(f"the place is {value!r}; expected a plain value, as JSON has them ({error}).") from None
        if plain != value:
            raise TypeError(
                f"the place is {value!r}, which JSON makes {plain!r}; expected lists, and keys that are text."
            )
        self._place = value

    def commit(self) -> None:
        """Write the records so far, and flush them to the disk."""
        if not self._pending:
            return
        try:
            with self._file.open("r+b") as file:
                file.seek(self._end)
                file.write(b"".join(self._pending))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._broken = f"{self._file} could not be written after step {self._step} ({error})"
            with contextlib.suppress(OSError):
                os.truncate(self._file, self._end)
            raise
        self._end += sum(map(len, self._pending))
        self._pending.clear()

    def close(self) -> None:
        """Commit, and let go of the optimizer and the folder."""
        if self._broken is None:
            self.commit()
            self._broken = f"the journal in {self.path} is closed"
        self._optimizer._watcher = NOBODY
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what the optimizer tells -----------------------------------------------------------------------------------

    def before(self, now: Any) -> None:
        """A step is about to be taken: raise while nothing has moved."""
        if self._broken is not None:
            raise JournalRefused(f"{self._broken}; expected Journal.resume, or no journal, for further steps.")
        self._check_parts()
        if (now.seed, now.step) != (self._header["seed"], self._step):
            raise JournalRefused(
                f"the optimizer has seed {now.seed} and step {now.step}, and the journal in {self.path} goes on with "
                f"seed {self._header['seed']} and step {self._step}; expected steps one after the other."
            )
        if (count := sum(len(group["params"]) for group in self._optimizer.param_groups)) != len(self._tracked.leaves):
            raise JournalRefused(
                f"the optimizer has {count} parameters and had {len(self._tracked.leaves)} when its journal began; "
                "expected the same ones."
            )
        versions = [own(leaf)._version for leaf in self._tracked.leaves]
        if self._started not in (None, versions):
            raise JournalRefused(
                f"step {now.step} was broken off when it may have moved the parameters; expected Journal.resume to go "
                "on."
            )
        self._started = versions

    def _check_parts(self) -> None:
        """Raise where the optimizer has got other parts than those in the header."""
        parts = [getattr(self._optimizer, name) for name in _PARTS]
        if any(map(operator.is_not, parts, self._parts)):
            compare(self._header, json.loads(json.dumps(identity(self._optimizer, self._tracked))), self._file)
            self._parts = parts

    def after(self, moved: Moved) -> None:
        """A step was taken: write it down."""
        self._broken = f"step {moved.now.step} was broken off while it was written down"
        self._step = moved.after.step
        body = encode(self._record(moved))
        data, self._chain = enframed(body, self._chain, self._end)
        self._pending.append(data)
        due = self._step % self._snapshot_every == 0
        if due or len(self._pending) >= self._commit_every:
            self.commit()
        if due:
            self._snapshot(moved.after)
        self._broken = self._started = None

    def _record(self, moved: Moved) -> StepRecord:
        groups, after = self._optimizer.param_groups, moved.after
        moves = {id(leaf) for leaf in moved.moving.tensors}
        moving = [id(leaf) in moves for leaf in self._tracked.leaves]
        digested = self._step % self._digest_every == 0
        return StepRecord(
            step=moved.now.step,
            seed=moved.now.seed,
            status=moved.status,
            loss=float(moved.loss),
            coefficients=torch.stack(list(moved.coefficients)),
            factor=moved.factor,
            block=moved.block,
            lrs=[float(group["lr"]) for group in groups],
            decays=[float(group["weight_decay"]) for group in groups],
            bad=after.bad,
            solver_state=after.solver_state,
            size=after.size,
            slopes=torch.stack(list(moved.slopes)) if self._learns else None,
            moving=None if all(moving) else moving,
            used=None if all(moved.used) else list(moved.used),
            place=self._place,
            buffers=self._changed(),
            digest=digest(self._tensors().values()) if digested else None,
            absent=moved.absent,
        )

    def _changed(self) -> dict[int, bytes]:
        """The buffers that are not what they were, by number."""
        found = {}
        for number, buffer in enumerate(self._tracked.buffers.values()):
            data = bytes_of(buffer)
            if data != self._buffers[number]:
                found[number] = self._buffers[number] = data
        return found

    # -- beginning and going on -------------------------------------------------------------------------------------

    def _prepare(
        self,
        path: Path,
        optimizer: Any,
        model: torch.nn.Module | None,
        snapshot_every: int,
        commit_every: int,
        digest_every: int,
        keep: int | None,
    ) -> None:
        for name, value in (("snapshot_every", snapshot_every), ("commit_every", commit_every)):
            check_whole(name, value, 1)
        check_whole("digest_every", digest_every, 1)
        if keep is not None:
            check_whole("keep", keep, 1)
        check(optimizer, model)
        self.path, self._file = path, path / FILE
        self._snapshot_every, self._commit_every = snapshot_every, commit_every
        self._digest_every, self._keep = digest_every, keep
        self._tracked: Tracked = tracked(optimizer, model)
        self._identity = json.loads(json.dumps(identity(optimizer, self._tracked)))
        self._optimizer: HyperplaneSearch = optimizer
        self._learns = bool(optimizer._settings.family.init().slots)
        if optimizer._watcher is not NOBODY:
            raise JournalRefused("the optimizer has a journal already; expected one for each.")
        self._pending, self._place, self._broken, self._started = [], None, None, None
        self.restored = None
        self._parts = [getattr(optimizer, name) for name in _PARTS]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The folder's lock, which is kept where all goes well."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(durable.locked(self.path))
            durable.tidy(self.path)
            yield
            self._lock = stack.pop_all()

    def _attach(self) -> None:
        self._buffers = [bytes_of(buffer) for buffer in self._tracked.buffers.values()]
        self._optimizer._watcher = self

    def _begin(self) -> None:
        now, tensors = self._optimizer._numbers, self._tensors()
        start, where = digest(tensors.values()).hex(), machine(self._tracked.leaves[0].device)
        self._header = {**self._identity, "first": now.step, "start": start, "machine": where}
        self._header["run"] = digest([], json.dumps(self._header)).hex()
        data = begin(json.dumps(self._header).encode())
        self._step, self._end = now.step, len(data)
        self._chain = scan(data, self._file).header.crc
        durable.remove([snapshots.path_of(self.path, step) for step in snapshots.steps_of(self.path)])
        with handed_over(self._optimizer, tensors):
            self._snapshot(now)
        durable.replace(self._file, lambda path: path.write_bytes(data))

    def _go_on(self, step: int | None) -> None:
        recorded = opened(self.path)
        self._header = recorded.header
        compare(self._header, self._identity, self._file)
        last = recorded.last if step is None else recorded.check(step)
        replica = recorded.replica(last, self._tracked.leaves[0].device)
        frame = recorded.frame(last)
        self._step, self._end, self._chain = last, frame.end, frame.crc
        with self._file.open("r+b") as file:
            file.truncate(self._end)
            os.fsync(file.fileno())
        behind = [number for number in snapshots.steps_of(self.path) if number > last]
        durable.remove([snapshots.path_of(self.path, number) for number in behind])
        self._restore(replica)

    @torch.no_grad()
    def _restore(self, replica: Replica) -> None:
        """Let the optimizer stand where a replica does."""
        put(self._optimizer, self._tracked, replica.named)
        self.restored = replica.named
        stalled = self._optimizer.patience is not None and replica.numbers.bad >= self._optimizer.patience
        numbers = replica.numbers._replace(bad=0) if stalled else replica.numbers
        set_numbers(self._optimizer, numbers._asdict(), replica.lrs, replica.decays)
        self._place = replica.place

    # -- snapshots --------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        return tensors_of(self._optimizer, self._tracked)

    def _snapshot(self, now: Any) -> None:
        numbers = now.step, self._chain, now.bad, now.solver_state, now.size
        rates = rates_of(self._optimizer)
        snapshots.write(self.path, self._tensors(), Standing(self._header["run"], *numbers, *rates, self._place))
        if self._keep is not None:
            steps = snapshots.steps_of(self.path)[1 : -self._keep]
            durable.remove([snapshots.path_of(self.path, step) for step in steps])
