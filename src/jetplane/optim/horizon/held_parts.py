"""What a step of HorizonAdam asks of all processes where FSDP shares its parameters out: sums over their parts.

A process moves its own parts, and has of Adam's means, of the trail and of the average those parts alone. The axes turn
inputs, and a part has some of a weight's outputs with all of their inputs: so the axes are everywhere, of a moment that
is a sum over the parts. What is exchanged is added up in the order of the ranks, and the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...ad.run.parts import is_shared_out, like_part
from ...errors import UnsupportedProgram
from ...parallel.processes import Processes

__all__ = ["ALL_HERE", "AllHere", "HeldParts", "held_parts"]

_WHAT = "the sums over the parts of parameters"


class AllHere:
    """Parameters that this process has whole."""

    def everywhere(self, holds: Tensor) -> Tensor:
        """() whether something holds on all processes."""
        return holds

    def products(self, found: Tensor, places: Sequence[int]) -> Tensor:
        """(n,) sums over the entries of the parameters at some ``places``, from those over the entries here."""
        return found

    def moment(self, found: Tensor, place: int) -> Tensor:
        """The same of a matrix that belongs to one parameter."""
        return found

    def sizes(self, leaves: Sequence[Tensor]) -> Tensor:
        """(n,) the mean size of the entries of each parameter."""
        return torch.stack([leaf.abs().mean(dtype=torch.float64) for leaf in leaves])

    def wholes(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Tensors like the parameters, whole."""
        return list(parts)

    def norm(self, grads: Sequence[Tensor]) -> Tensor:
        """() that of all gradients together."""
        return torch.nn.utils.get_total_norm(list(grads))


ALL_HERE = AllHere()


class HeldParts(AllHere):
    """Parameters of which this process has a part of some. A part that several have is counted once."""

    def __init__(self, given: Sequence[Tensor], processes: Processes) -> None:
        self._given, self._processes = list(given), processes
        self._counts = [_is_counted(leaf, processes) for leaf in given]

    def everywhere(self, holds: Tensor) -> Tensor:
        (bad,) = self._processes.sums([(~holds).to(torch.float64).reshape(1)], _WHAT)
        return bad[0] == 0

    def products(self, found: Tensor, places: Sequence[int]) -> Tensor:
        counted = torch.tensor([self._counts[place] for place in places], device=found.device)
        (total,) = self._processes.sums([torch.where(counted, found, 0.0)], _WHAT)
        return total

    def moment(self, found: Tensor, place: int) -> Tensor:
        if not is_shared_out(self._given[place]):
            return found
        (total,) = self._processes.sums([found if self._counts[place] else torch.zeros_like(found)], _WHAT)
        return total

    def sizes(self, leaves: Sequence[Tensor]) -> Tensor:
        here = torch.stack([leaf.abs().sum(dtype=torch.float64) for leaf in leaves])
        counts = torch.tensor([given.numel() for given in self._given], dtype=torch.float64, device=here.device)
        return self.products(here, range(len(leaves))) / counts

    def wholes(self, parts: Sequence[Tensor]) -> list[Tensor]:
        shared = [like_part(given, part) for given, part in zip(self._given, parts, strict=True)]
        return [one.full_tensor() if is_shared_out(one) else one for one in shared]  # type: ignore[attr-defined]

    def norm(self, grads: Sequence[Tensor]) -> Tensor:
        squares = torch.stack([grad.to(torch.float64).square().sum() for grad in grads])
        return self.products(squares, range(len(grads))).sum().sqrt()


def held_parts(given: Sequence[Tensor], turned: set[int], processes: Processes | None) -> AllHere:
    """Those of some parameters, of which those at the places ``turned`` have axes."""
    if processes is None or not any(map(is_shared_out, given)):
        return ALL_HERE
    for place in sorted(turned):
        leaf = given[place]
        if is_shared_out(leaf) and any(placement.is_shard() and placement.dim for placement in leaf.placements):  # type: ignore[attr-defined]
            raise UnsupportedProgram(
                f"parameter {place} of shape {tuple(leaf.shape)} has the placements {leaf.placements}, "  # type: ignore[attr-defined]
                "which cut the inputs that HorizonAdam has axes of; expected Shard(0), as fully_shard makes them by "
                "default, or rotate=False."
            )
    return HeldParts(given, processes)


def _is_counted(leaf: Tensor, processes: Processes) -> bool:
    """Whether this process is the first of those that have its part."""
    if not is_shared_out(leaf):
        return processes.rank == 0
    place = leaf.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    return all(at == 0 or placement.is_shard() for at, placement in zip(place, leaf.placements, strict=True))  # type: ignore[attr-defined]
