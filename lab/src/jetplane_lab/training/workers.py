"""The processes that torchrun has started, where it has: each trains on its part of every batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from jetplane.errors import LostProcess

__all__ = ["ALONE", "Workers"]

Found = TypeVar("Found")


@dataclass(frozen=True)
class Workers:
    """The processes of a run. All have the same parameters, bit for bit; the first one writes."""

    rank: int = 0
    size: int = 1
    group: Any = None

    @staticmethod
    def launched() -> Workers:
        """Those of torchrun, by the variables that it sets; without it this process is alone."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return ALONE
        if not distributed.is_available():
            raise ValueError(f"WORLD_SIZE is {size}, but this torch has no torch.distributed; expected 1.")
        if not distributed.is_initialized():
            # numbers are exchanged on the host, whatever the device of the parameters is
            distributed.init_process_group("gloo", **_meeting())
        return Workers(distributed.get_rank(), distributed.get_world_size(), distributed.group.WORLD)

    @property
    def writes(self) -> bool:
        """Whether this is the process that records the run."""
        return self.rank == 0

    def shard(self, index: Tensor) -> Tensor:
        """This process's part of a batch: a stretch of it, as long as the others' or longer by one.

        Example:
            >>> [Workers(rank, 2).shard(torch.arange(5)).tolist() for rank in range(2)]
            [[0, 1, 2], [3, 4]]
        """
        return index.tensor_split(self.size)[self.rank]

    def total(self, count: int) -> int:
        """The sum of a count over the processes."""
        return self._reduced(count, "SUM")

    def any(self, here: bool) -> bool:
        """Whether it is so in any process."""
        return bool(self._reduced(int(here), "MAX"))

    def led(self, compute: Callable[[], Found], what: str) -> Found:
        """What the first process finds, in all of them. Where it fails there the others are told, and none waits."""
        if self.size == 1:
            return compute()
        said: list[Any] = [None]
        if self.writes:
            try:
                said = [(compute(),)]
            finally:  # an interruption, too
                distributed.broadcast_object_list(said, src=0, group=self.group)
        else:
            distributed.broadcast_object_list(said, src=0, group=self.group)
        if said[0] is None:
            raise LostProcess(f"process 0 could not go on at {what}; what went wrong is in the message there.")
        found: Found = said[0][0]
        return found

    def leave(self) -> None:
        """The end of a run, for all processes."""
        if self.size > 1:
            distributed.destroy_process_group()

    def _reduced(self, count: int, how: str) -> int:
        if self.size == 1:
            return count
        number = torch.tensor([count], dtype=torch.int64)
        distributed.all_reduce(number, getattr(distributed.ReduceOp, how), group=self.group)
        return int(number)


def _meeting() -> dict[str, Any]:
    """Where processes meet. torchrun's own store outlives a restart, and would lead to processes that are gone."""
    place = os.environ
    if place.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or place.get("GROUP_WORLD_SIZE") != "1":
        return {}  # of several machines each counts its restarts by itself
    # torch exports them, and does not say so to type checkers
    store = distributed.TCPStore(place["MASTER_ADDR"], int(place["MASTER_PORT"]), is_master=False)  # type: ignore[attr-defined]
    apart = distributed.PrefixStore(f"restart-{place['TORCHELASTIC_RESTART_COUNT']}", store)  # type: ignore[attr-defined]
    return {"store": apart, "rank": int(place["RANK"]), "world_size": int(place["WORLD_SIZE"])}


ALONE = Workers()
