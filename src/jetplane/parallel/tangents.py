"""Processes that share the tangents of one batch: each carries some of a forward gradient's, and all get all of them.

A tangent's noise is a function of its number, so nothing has to be said before a pass. What comes of a tangent are few
numbers for each sample: the scalar that multiplies its noise, what it did to the loss's input, what a batch norm saw of
it. These are gathered in float64, which holds every shorter dtype exactly, in the order of the tangents. From there on
every process does what one alone does; no gradient goes over the wire.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import LostProcess, ProcessesDiffer
from .processes import Processes

__all__ = ["Tangents"]

_SAID = 2  # numbers, before what came of the tangents, and of the losses
_ALIKE = 1e-4  # of a loss: as near as rounding leaves the losses of one batch


class Tangents:
    """The processes that have the same part of a batch, in one call."""

    def __init__(self, processes: Processes, what: str) -> None:
        self._processes, self._what = processes, what
        self._closed = False

    def mine(self, count: int) -> range:
        """The numbers of those of ``count`` tangents that this process carries."""
        size, rank = self._processes.size, self._processes.rank
        if count < size:
            raise ValueError(
                f"{size} processes are to share {count} tangents; expected as many tangents as processes at least, "
                "by samples=, or fewer processes for them."
            )
        return range(rank * count // size, (rank + 1) * count // size)

    def gathered(self, parts: Sequence[Tensor], count: int) -> list[Tensor]:
        """``parts`` (own, *S) of this process's tangents, as those (count, *S) of all."""
        own = self.mine(count)
        flat = torch.cat([part.detach().to("cpu", torch.float64).reshape(len(own), -1) for part in parts], 1)
        width = flat.shape[1]
        heads = self._gather(flat.new_tensor([count, width]))
        for rank, head in enumerate(heads):
            if not torch.equal(head, heads[0]):
                raise ProcessesDiffer(
                    f"process {rank} of those that share tangents has {int(head[0])} of {int(head[1])} numbers "
                    f"each at {self._what}, and process 0 {int(heads[0][0])} of {int(heads[0][1])}; expected the same "
                    "program and batch in both."
                )
        sizes = [(rank + 1) * count // len(heads) - rank * count // len(heads) for rank in range(len(heads))]
        record = flat.new_zeros(max(sizes) * width)
        record[: flat.numel()] = flat.reshape(-1)
        heard = self._gather(record)
        whole = torch.cat([one[: size * width].reshape(size, width) for one, size in zip(heard, sizes, strict=True)])
        found = whole.split([part[0].numel() for part in parts], 1)
        return [one.reshape(count, *part.shape[1:]).to(part) for one, part in zip(found, parts, strict=True)]

    def check(self, losses: Tensor) -> None:
        """At the end: raise where a process has other losses (B, ...) than the first one."""
        mean = losses.detach().double().mean().cpu()
        records = self._gather(torch.stack([mean.new_tensor(float(losses.shape[0])), mean]))
        self._closed = True
        first = records[0]
        for rank, record in enumerate(records):
            near = torch.isclose(record[1], first[1], rtol=_ALIKE, atol=0.0, equal_nan=True)
            if record[0] != first[0] or not bool(near):
                raise ProcessesDiffer(
                    f"process {rank} of those that share tangents has {int(record[0])} losses of mean "
                    f"{float(record[1]):.6g} at {self._what}, and process 0 {int(first[0])} of {float(first[1]):.6g}; "
                    "expected the same batch, and the same random numbers, in both."
                )

    def fail(self) -> None:
        """Tell the others that this process has failed, so that none waits for it."""
        if not self._closed:
            self._closed = True
            self._processes.fail(_SAID, self._what)

    def _gather(self, numbers: Tensor) -> list[Tensor]:
        try:
            return self._processes.gather(numbers, self._what)
        except LostProcess:
            self._closed = True
            raise
