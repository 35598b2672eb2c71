"""Parameters of which each process has a part: DTensors, as tensor parallelism and FSDP's ``fully_shard`` make them.

Directions belong to the whole parameter, and a process's rows are its part of the whole rows. So a plane does not
depend on who has which part, and nothing has to be sent for it: every process makes the rows that its program reads.
These are

    the part itself       which the operations of a DTensor read
    with FSDP, the whole  which is gathered for each use into memory that is freed and comes back: the rows are those of
                          the whole parameter, made anew at each use, in the dtype in which it was gathered
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedProgram
from .. import _torch_distributed as groups
from ..algebra.sparse import Block
from .directions import Leaf

__all__ = [
    "Wholes",
    "check_parts",
    "images",
    "is_shared_out",
    "like_part",
    "own",
    "part_of",
    "shared_facts",
    "whole_like",
]


def is_shared_out(tensor: Tensor) -> bool:
    """Whether a process may have a part of it alone.

    Example:
        >>> import torch
        >>> is_shared_out(torch.ones(2))
        False
    """
    return groups.is_dtensor(tensor)


def own(tensor: Tensor) -> Tensor:
    """What this process has of a tensor."""
    return groups.inside(tensor)


def whole_like(tensor: Tensor) -> Tensor:
    """A plain tensor of the whole's shape, dtype and device, without memory of its own: for what asks for no more."""
    return own(tensor).new_empty(()).expand(tensor.shape) if is_shared_out(tensor) else tensor


def part_of(rows: Tensor, tensor: Tensor, lead: int = 0) -> Tensor:
    """This process's part of something like the whole ``tensor``, with ``lead`` more axes in front."""
    for cut in groups.cuts(tensor) or ():
        parts = rows.chunk(cut.parts, cut.axis + lead)
        # of few entries the last processes have none
        rows = parts[cut.number] if cut.number < len(parts) else rows.narrow(cut.axis + lead, 0, 0)
    return rows


def check_parts(tensor: Tensor, label: str) -> None:
    """Raise unless a process's part of a DTensor is a stretch of it along some axes."""
    if groups.cuts(tensor) is None:
        raise UnsupportedProgram(
            f"{label} is a DTensor with the placements {tensor.placements} on "  # type: ignore[attr-defined]
            f"{tensor.device_mesh}, of which this process has no stretch; expected Shard or Replicate, "  # type: ignore[attr-defined]
            "as FSDP's fully_shard and tensor parallelism make them."
        )
    shape = tuple(part_of(whole_like(tensor), tensor).shape)
    if shape != tuple(own(tensor).shape):
        raise UnsupportedProgram(
            f"{label} is a DTensor {tuple(tensor.shape)} whose part is {tuple(own(tensor).shape)} here, where its "
            f"placements say {shape}; expected parts as torch.chunk makes them."
        )


def like_part(tensor: Tensor, part: Tensor) -> Tensor:
    """A tensor that is shared out as ``tensor`` is, of which this process has ``part``; ``part`` where it is not."""
    if not is_shared_out(tensor):
        return part
    found = torch.empty_like(tensor, requires_grad=False, dtype=part.dtype)
    own(found).copy_(part)
    return found


def shared_facts(tensors: Sequence[Tensor], labels: Sequence[str]) -> dict[str, Any]:
    """What has to be the same of shared parameters in all processes; what is in them, is not."""
    found: dict[str, Any] = {}
    for tensor, label in zip(tensors, labels, strict=True):
        if is_shared_out(tensor):
            found[f"the whole shape of {label}"] = str(tuple(tensor.shape))
            found[f"the dtype of the whole {label}"] = str(tensor.dtype)
            found[f"the placements of {label}"] = str(tensor.placements)  # type: ignore[attr-defined]
    return found


class Wholes:
    """Parameters that FSDP shares out, whole for as long as a step needs them: :attr:`tensors`, which modules use."""

    def __init__(self, given: Sequence[Tensor], labels: Sequence[str]) -> None:
        known = groups.managed() if any(map(is_shared_out, given)) else {}
        for tensor, label in zip(given, labels, strict=True):
            if is_shared_out(tensor) and id(tensor) not in known:
                raise UnsupportedProgram(
                    f"{label} is a DTensor that FSDP's fully_shard does not manage, as tensor parallelism makes them: "
                    "noise in its program would reach what other processes compute. Expected parameters of "
                    "fully_shard, or an optimizer that searches a plane."
                )
        self._given = list(given)
        self._managed = [known[id(tensor)] for tensor in given if is_shared_out(tensor)]
        self._inside = 0

    @property
    def any(self) -> bool:
        """Whether any is shared out."""
        return bool(self._managed)

    @property
    def tensors(self) -> list[Tensor]:
        """What programs read."""
        managed = iter(self._managed)
        return [next(managed).whole() if is_shared_out(tensor) else tensor for tensor in self._given]

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, every process has them whole, as their parts are now. Once more inside of that does nothing."""
        if not self._managed or self._inside:
            yield
            return
        self._inside += 1
        try:
            with groups.kept_whole(self._managed):
                yield
        finally:
            self._inside -= 1


@dataclass(frozen=True)
class PartOf:
    """The source of a part's tangents."""

    leaf: Leaf  # of the whole
    shared: Tensor | None  # the DTensor that says which part; None: all of it
    like: Tensor  # the part

    structured = False

    def tangent(self) -> Tensor:
        """(rows chosen, *S)"""
        rows = self.leaf.tangent()
        if self.shared is not None:
            rows = part_of(rows, self.shared, lead=1)
        return rows.to(self.like.dtype)

    def second(self) -> Tensor | None:
        return None

    def blocks(self) -> list[Block]:
        return [Block(0, self.tangent())]


def images(leaf: Leaf, managed: groups.Managed | None) -> Iterator[tuple[Tensor, PartOf]]:
    """Each memory in which a program reads the DTensor of ``leaf``, with the source of its tangents."""
    shared, mine = leaf.tensor, own(leaf.tensor)
    leaf = replace(leaf, tensor=whole_like(shared))
    if mine.numel():
        yield mine, PartOf(leaf, shared, mine)
    if managed is not None:
        whole = managed.whole()
        inner = own(whole)
        yield inner, PartOf(leaf, whole if is_shared_out(whole) else None, inner)
