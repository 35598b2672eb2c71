"""Processes that share the directions of one batch: each runs some chunks of a plane's passes, and all get the rows.

The chunks are those that bound memory in one process, as many as there are processes at least. What a process has
found, K tangents and second-order rows of a loss, or of the losses of its samples, is gathered in float64, which holds
every shorter dtype exactly. The batch, its random numbers and the loss are the same in all of them; the loss itself is
taken from the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..ad.algebra.jet import Jet, PairSet
from ..ad.run.passes import Chunk, chunks
from ..errors import ProcessesDiffer
from .processes import Processes

__all__ = ["Columns"]

_ALIKE = 1e-4  # of a loss: as near as rounding leaves the losses of one batch

Jets = list[Jet]  # one for each closure


class Columns:
    """The processes that have the same part of a batch."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def work(self, pairs: PairSet, size: int | None, late: bool) -> list[Chunk]:
        """The chunks of a plane, at least one for each process and none larger than ``size``."""
        count = self._processes.size
        if late and count > 1:
            raise ValueError(
                f"{count} processes are to share the directions of a curvature that begins at the loss, which needs "
                "all of them in one pass; expected the exact curvature, none, the empirical Fisher, or data alone."
            )
        for blocks in range(1, pairs.k + 1):
            most = -(-pairs.k // blocks)
            found = chunks(pairs, most if size is None else min(size, most), late)
            if len(found) >= count:
                return found
        raise ValueError(
            f"{count} processes are to share a plane of K = {pairs.k}, which is {len(found)} passes at most; expected "
            "more directions, or fewer processes for them."
        )

    def passes(self, work: Sequence[Chunk], run: Callable[[Chunk], Jets], what: str) -> list[Jets]:
        """The jets of all chunks, of which this process runs some."""
        processes = self._processes
        with processes.telling(3, what):
            mine = {n: run(chunk) for n, chunk in enumerate(work) if n % processes.size == processes.rank}
            primals = [jet.primal for jet in next(iter(mine.values()))]
            loss = torch.stack([primal.double().mean() for primal in primals]).sum().cpu()
            counts = [float(sum(primal.numel() for primal in primals)), float(len(work))]
            seen = torch.cat([loss.new_tensor(counts), loss.reshape(1)])
        self._check(processes.gather(seen, what), what)
        sizes = [self._size(work, rank, primals) for rank in range(processes.size)]
        record = torch.zeros(max(sizes), dtype=torch.float64, device="cpu")
        own = torch.cat([*map(_flat, primals), *(_rows(work[n], jets) for n, jets in mine.items())])
        record[: len(own)] = own
        records = [part[:size] for part, size in zip(processes.gather(record, what), sizes, strict=True)]
        return self._read(work, records, primals)

    def _size(self, work: Sequence[Chunk], rank: int, primals: Sequence[Tensor]) -> int:
        """How many numbers a process has to say."""
        rows = sum(len(chunk.rows) + chunk.pairs.rows for chunk in work[rank :: self._processes.size])
        return sum(primal.numel() for primal in primals) * (1 + rows)

    def _read(self, work: Sequence[Chunk], records: Sequence[Tensor], primals: Sequence[Tensor]) -> list[Jets]:
        left = list(records)
        losses = []
        for rank in range(len(left)):
            heads = []
            for primal in primals:
                head, left[rank] = left[rank].tensor_split([primal.numel()])
                heads.append(head.to(primal).view_as(primal))
            losses.append(heads)
        found = []
        for n, chunk in enumerate(work):
            rank, jets = n % len(left), []
            for primal, loss in zip(primals, losses[0], strict=True):
                parts = []
                for rows in (len(chunk.rows), chunk.pairs.rows):
                    part, left[rank] = left[rank].tensor_split([rows * primal.numel()])
                    parts.append(part.to(primal).reshape(rows, *primal.shape))
                jets.append(Jet(loss, *parts))
            found.append(jets)
        return found

    @staticmethod
    def _check(records: Sequence[Tensor], what: str) -> None:
        """Raise where a process has another batch than the first one of those that share directions."""
        first = records[0]
        for rank, record in enumerate(records):
            if record[1] != first[1]:
                raise ProcessesDiffer(
                    f"process {rank} of those that share directions has {int(record[1])} passes to share at {what}, "
                    f"and process 0 {int(first[1])}; expected the same chunk_size, or memory, in both."
                )
            near = torch.isclose(record[2], first[2], rtol=_ALIKE, atol=0.0, equal_nan=True)
            if record[0] != first[0] or not bool(near):
                raise ProcessesDiffer(
                    f"process {rank} of those that share directions has {int(record[0])} losses of mean "
                    f"{float(record[2]):.6g} at {what}, and process 0 {int(first[0])} of {float(first[2]):.6g}; "
                    "expected the same batch, and the same random numbers, in both."
                )


def _flat(part: Tensor) -> Tensor:
    return part.detach().to("cpu", torch.float64).reshape(-1)


def _rows(chunk: Chunk, jets: Jets) -> Tensor:
    """Tangents and second-order rows of a chunk, zero where there are none."""
    parts = []
    for jet in jets:
        for rows, count in ((jet.tangent, len(chunk.rows)), (jet.second, chunk.pairs.rows)):
            none = torch.zeros(count * jet.primal.numel(), dtype=torch.float64, device="cpu")
            parts.append(none if rows is None or not count else _flat(rows))
    return torch.cat(parts)
