"""The processes of a group, and the few things that they say to each other: all of it in the order of their ranks.

No backend promises that an all-reduce has the same bits everywhere, or the same from run to run. So numbers are
gathered and every process adds them up itself, in the order of the ranks; large tensors are cut into as many parts as
there are processes, and each adds up one of them. What one process cannot do is told to the others in the place of its
numbers, and one that is not heard from is named.
"""

from __future__ import annotations

import atexit
import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed

from ..ad._torch_distributed import SEEN, holders
from ..ad.engine.locate import users_level
from ..errors import LostProcess, ProcessesDiffer

__all__ = ["Processes", "processes_of", "say_alone"]

_HELD: list[Tensor] = []  # by a thread of gloo
_MOMENT = 2.0  # seconds: far more than it takes
_AT_ONCE = 1 << 22  # numbers of large tensors that are on their way together
_POSTED = "jetplane/"  # with a rank: how many exchanges that process has begun


class Processes:
    """A process among the others of its group. Copies stay in the same group."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size, self.rank = distributed.get_world_size(group), distributed.get_rank(group)
        self._ranks = distributed.get_process_group_ranks(group)  # among all processes, by which they are named
        hosted = "cpu" in distributed.get_backend_config(group)
        self.device = torch.device("cpu") if hosted else torch.device("cuda", torch.cuda.current_device())
        self._begun = 0  # exchanges

    def __deepcopy__(self, memo: Any) -> Processes:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a process group cannot be pickled; expected state_dict() of what uses it, and process_group= in the "
            "process that goes on."
        )

    def known(self, ranks: Sequence[int]) -> list[int]:
        """Processes of this group by their ranks among all, as torchrun and other groups know them."""
        return [self._ranks[rank] for rank in ranks]

    # -- exchanges --------------------------------------------------------------------------------------------------

    def gather(self, numbers: Tensor, what: str) -> list[Tensor]:
        """The numbers (n,) in float64 of all processes, by rank. ``what`` is being done, for messages."""
        records = self._all_gather(torch.cat([numbers.new_zeros(1), numbers]), what)
        failed = [rank for rank, record in enumerate(records) if record[0] != 0]
        if failed:
            who = named(self.known(failed))
            raise LostProcess(f"{who} raised an error at {what}; what went wrong is in the message there.")
        return [record[1:] for record in records]

    @contextlib.contextmanager
    def telling(self, length: int, what: str) -> Iterator[None]:
        """Around what makes the numbers (length,) of the next :meth:`gather`: where it fails the others are told."""
        try:
            yield
        except Exception:
            self.fail(length, what)
            raise

    def fail(self, length: int, what: str) -> None:
        """Tell the others in the place of the numbers (length,) of the next :meth:`gather` that there will be none.

        Not where the program itself has collectives: they may wait in one, for other things than these numbers.
        """
        if not SEEN.inside_programs:
            with contextlib.suppress(LostProcess):
                self._all_gather(torch.ones(1 + length, dtype=torch.float64, device="cpu"), what)

    def led(self, compute: Callable[[], Tensor], length: int, what: str) -> Tensor:
        """The numbers (length,) in float64 that the first process computes, on all of them."""
        record = torch.zeros(1 + length, dtype=torch.float64, device="cpu")
        error: Exception | None = None
        if self.rank == 0:
            try:
                record[1:] = compute()
            except Exception as raised:
                error, record[0] = raised, 1.0
        there = record.to(self.device)
        self._exchange(lambda: distributed.broadcast(there, group=self.group, group_src=0), what, [there])
        if error is not None:
            raise error
        record = there.cpu()
        if record[0] != 0:
            who = named(self.known([0]))
            raise LostProcess(f"{who} raised an error at {what}; what went wrong is in the message there.")
        return record[1:]

    def follow(self, tensors: Sequence[Tensor], what: str) -> None:
        """Let tensors have the bits that they have in the first process."""
        for tensor in tensors:
            here = tensor.detach().to(self.device).contiguous()
            raw = here.reshape(-1).view(torch.uint8)
            if len(raw):
                self._exchange(partial(distributed.broadcast, raw, group=self.group, group_src=0), what, [raw])
            if self.rank:
                with torch.no_grad():
                    tensor.copy_(here)

    def texts(self, text: str, what: str) -> list[str]:
        """A text of each process, by rank."""
        data = text.encode()
        sizes = [int(size) for size in self.gather(torch.tensor([len(data)], dtype=torch.float64, device="cpu"), what)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        found = self._all_gather(padded, what)
        return [bytes(one[:size].tolist()).decode() for one, size in zip(found, sizes, strict=True)]

    def sums(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """The sums of tensors over the processes, in the order of the ranks, and so the same bits on all of them."""
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for position, tensor in enumerate(tensors):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(position)
        found: dict[int, Tensor] = {}
        for positions in kinds.values():
            flat = torch.cat([tensors[position].reshape(-1) for position in positions])
            total = torch.cat([self._sum(part, what) for part in flat.split(_AT_ONCE)]) if len(flat) else flat
            parts = total.split([tensors[position].numel() for position in positions])
            for position, part in zip(positions, parts, strict=True):
                found[position] = part.view_as(tensors[position])
        return [found[position] for position in range(len(tensors))]

    def _sum(self, flat: Tensor, what: str) -> Tensor:
        """That of one flat tensor: each process adds up one part of it, and all get all parts."""
        size = -(-len(flat) // self.size)
        sent = flat.new_zeros(size * self.size, device=self.device)
        sent[: len(flat)] = flat
        heard = torch.empty_like(sent)
        self._exchange(lambda: distributed.all_to_all_single(heard, sent, group=self.group), what, [heard, sent])
        mine, *others = heard.split(size)
        total = mine.clone()
        for other in others:
            total += other
        return torch.cat(self._all_gather(total, what))[: len(flat)].to(flat.device)

    def _all_gather(self, record: Tensor, what: str) -> list[Tensor]:
        mine = record.contiguous().to(self.device)
        heard = [torch.empty_like(mine) for _ in range(self.size)]
        self._exchange(lambda: distributed.all_gather(heard, mine, group=self.group), what, [mine, *heard])
        return [one.to(record.device) for one in heard]

    # -- faults -----------------------------------------------------------------------------------------------------

    def _exchange(self, call: Callable[[], Any], what: str, tensors: Sequence[Tensor]) -> None:
        """Do it, and name who is missing where it fails. ``tensors`` are those that travel."""
        self._begun += 1
        with contextlib.suppress(RuntimeError):  # the exchange itself will say that nobody is there
            self._post()
        try:
            call()
        except RuntimeError as error:
            missing = self.known(self._missing())
            who = "a process is" if not missing else f"{named(missing)} {'is' if len(missing) == 1 else 'are'}"
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise LostProcess(
                f"{who} gone, or did not answer in time, at {what} ({first}); expected all {self.size} processes to "
                "take every step. A longer timeout is an argument of init_process_group or new_group."
            ) from error
        if self.device.type == "cpu":
            _keep_held(tensors)

    def _post(self) -> None:
        """Note that an exchange begins, where the others can read it if it fails."""
        self.group.get_group_store().set(f"{_POSTED}{self.rank}", str(self._begun))

    def _missing(self) -> list[int]:
        """The processes that have not begun this exchange; none where that cannot be told."""
        found = []
        try:
            store = self.group.get_group_store()
            for rank in range(self.size):
                key = f"{_POSTED}{rank}"
                if rank != self.rank and (not store.check([key]) or int(store.get(key)) < self._begun):
                    found.append(rank)
        except RuntimeError:  # the process that keeps the store is the one that is gone
            return []
        return found


def _keep_held(tensors: Sequence[Tensor]) -> None:
    """Keep those of some tensors that gloo's thread still holds, as it does for a moment after they have arrived.

    Were it the last to hold one, it would need Python's lock to free it, and a process that ends just then is aborted:
    "terminate called without an active exception", with the status -6, after all work was done.
    """
    _HELD[:] = [tensor for tensor in (*_HELD, *tensors) if holders(tensor) > 1]


@atexit.register
def _settle() -> None:
    """Before Python ends: wait for that thread."""
    until = time.monotonic() + _MOMENT
    while _HELD and time.monotonic() < until:
        time.sleep(1e-3)
        _keep_held(())


def named(ranks: Sequence[int]) -> str:
    """Processes in words.

    Example:
        >>> named([1]), named([0, 2, 3])
        ('process 1', 'processes 0, 2 and 3')
    """
    if len(ranks) == 1:
        return f"process {ranks[0]}"
    return f"processes {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def processes_of(process_group: Any) -> Processes | None:
    """The processes of what was given as ``process_group``; None where nothing was.

    Example:
        >>> assert processes_of(None) is None
    """
    if process_group is None:
        return None
    known = distributed.is_available() and isinstance(process_group, distributed.ProcessGroup)
    outside = distributed.is_available() and process_group is distributed.GroupMember.NON_GROUP_MEMBER
    if outside or (known and distributed.get_rank(process_group) < 0):
        raise ValueError("this process is not in process_group; expected a group that it is a member of.")
    if not known:
        name = type(process_group).__name__
        raise TypeError(
            f"process_group is {name}; expected a ProcessGroup such as torch.distributed.group.WORLD, or None."
        )
    return Processes(process_group)


def say_alone(name: str) -> None:
    """Warn where there are several processes and ``name`` was given no group of them."""
    if not distributed.is_available() or not distributed.is_initialized():
        return
    size = distributed.get_world_size()
    if size > 1:
        warnings.warn(
            f"{size} processes are initialised and {name} has process_group=None: each process steps by itself, and "
            "parameters will differ between them where batches do. Expected "
            "process_group=torch.distributed.group.WORLD for steps that all take together.",
            UserWarning,
            stacklevel=users_level(),
        )


def require_same(parts: Sequence[dict[str, Any]], what: str) -> None:
    """Raise where a process says something else than the first one, by the first such entry."""
    for rank, part in enumerate(parts):
        for name, value in parts[0].items():
            if part.get(name) != value:
                raise ProcessesDiffer(
                    f"process {rank} differs from process 0 at {what}: {name} is {part.get(name)} there, and {value} "
                    "on process 0; expected the same on all processes."
                )
