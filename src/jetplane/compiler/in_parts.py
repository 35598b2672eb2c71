"""A compiled call whose batch goes in parts: one graph for each of them in turn, and one for what all have found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .capture import Compiled

__all__ = ["InParts", "joined"]


@dataclass(frozen=True, eq=False)
class InParts:
    """Takes the inputs of a call, of which those at ``places`` have all samples of the batch.

    ``part`` takes them with one part of the samples there, and at the end the number of samples before it; its last
    output is that part's share of something, and those at ``aux`` have an entry for each sample. ``end`` takes the same
    inputs after the last part, with the sum of the shares at the end. Between them ``exchange`` is what other processes
    have found: it changes the inputs that parts add to, and gives the sum of all.
    """

    part: Compiled
    end: Compiled
    places: Sequence[int]
    offsets: Sequence[Tensor]  # (), of each part
    aux: Sequence[int]
    exchange: Callable[[Sequence[Tensor], Tensor], Tensor] | None = None

    @property
    def compiled(self) -> Compiled:
        """As one function of tensors."""
        return Compiled(self, self.part.written | self.end.written)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of the parts' program, and of the end."""
        found: list[Sequence[Tensor]] = []
        now = list(inputs)
        for number, offset in enumerate(self.offsets):
            for place in self.places:
                size = inputs[place].shape[0] // len(self.offsets)
                now[place] = inputs[place].narrow(0, number * size, size)
            found.append(self.part([*now, offset]))
        total = torch.stack([outputs[-1] for outputs in found]).sum(0)
        if self.exchange is not None:
            total = self.exchange(now, total)
        return [*joined(found, self.aux)[:-1], *self.end([*now, total])]


def joined(found: Sequence[Sequence[Tensor]], aux: Sequence[int]) -> list[Tensor]:
    """The outputs of parts: those of the first, and at the places of ``aux`` the entries of all of them.

    Example:
        >>> joined([[torch.ones(1), torch.ones(1)], [torch.zeros(1), torch.zeros(1)]], aux=[1])
        [tensor([1.]), tensor([1., 0.])]
    """
    outputs = list(found[0])
    for place in aux if len(found) > 1 else ():
        outputs[place] = torch.cat([one[place] for one in found])
    return outputs
