"""A batch in parts of its samples, whose estimates add up to that of the whole, in a part of its memory.

A sample's noise goes to its own loss alone, so nothing is computed twice for it: tangents in chunks, the other way to
save memory, have the program run once more for each chunk. That losses are those of samples, whatever else is in the
batch, is looked at: a part must have the losses that the whole has there. Random numbers, which parts draw for
themselves, are left out of that comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ad import _torch
from ...ad.draws import draws
from ...ad.run.replay import Replay
from ..program.loss_program import LossProgram

__all__ = ["Division", "Inseparable", "ShardOf", "agree", "alike", "can_be_cut"]

aten = torch.ops.aten


class Inseparable(Exception):
    """The samples of a batch cannot be taken in parts."""


@dataclass(frozen=True)
class Division:
    """How a batch is taken in parts."""

    samples: int  # of the whole
    count: int  # of parts
    tangents: int  # J of each sample

    @property
    def size(self) -> int:
        """Samples of a part."""
        return self.samples // self.count

    def part(self, batch: Any, number: int = 0) -> Any:
        """The tensors of a batch, a tree, with a part of their samples; others stay.

        Example:
            >>> Division(6, 3, 8).part((torch.arange(6), torch.ones(2), "a word"), 1)
            (tensor([2, 3]), tensor([1., 1.]), 'a word')
        """

        def cut(tensor: Tensor) -> Tensor:
            return tensor.narrow(0, number * self.size, self.size) if _has(tensor, self.samples) else tensor

        return _torch.pytree.tree_map_only(Tensor, cut, batch)

    def parts(self, batch: Any) -> list[Any]:
        """All parts of a batch."""
        return [self.part(batch, number) for number in range(self.count)]


@dataclass(frozen=True)
class ShardOf(Division):
    """A process's samples, as they are, of a batch that several processes have: the one part that it takes."""

    mine: int  # samples

    @property
    def size(self) -> int:
        return self.mine

    def part(self, batch: Any, number: int = 0) -> Any:
        return batch


def can_be_cut(batch: Any, samples: int) -> bool:
    """Whether a batch holds tensors with an entry for each sample."""
    return any(isinstance(leaf, Tensor) and _has(leaf, samples) for leaf in _torch.pytree.tree_leaves(batch))


def _has(tensor: Tensor, samples: int) -> bool:
    return tensor.ndim > 0 and tensor.shape[0] == samples


def agree(func: Callable[..., Any], batch: Sequence[Any], division: Division, devices: Sequence[torch.device]) -> bool:
    """Whether the parts of a batch have the losses that they have in the whole."""
    replay = Replay(devices)

    def losses(given: Any) -> Tensor:
        def run() -> Tensor:
            with torch.no_grad(), _Still():
                return LossProgram(func, given, False)()[0]

        found: Tensor = replay.run(run)
        return found

    try:
        whole = losses(batch).split(division.size)
        return all(alike(losses(part), here) for part, here in zip(division.parts(batch), whole, strict=True))
    except Exception:  # whatever it is, the program does not take parts of its batch
        return False
    finally:
        replay.rewind()


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether losses are the same but for rounding, which depends on how many there are."""
    if one.shape != other.shape:
        return False
    close = torch.finfo(one.dtype).eps ** 0.5
    size = float(other.abs().nan_to_num(0.0, 0.0, 0.0).amax())
    return torch.allclose(one, other, rtol=close, atol=close * size, equal_nan=True)


class _Still(_torch.DispatchMode):
    """Random numbers are the same constant for every sample. What cannot be kept still raises Inseparable."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        packet = func.overloadpacket
        if packet is aten.native_dropout:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if packet in _ALIKE:
            return torch.full_like(args[0], _MIDDLE[packet])
        if packet in _FILLED:
            return args[0].fill_(_FILLED[packet])
        return _without_dropout(func, args, kwargs)


_MIDDLE = {aten.rand_like: 0.5, aten.randn_like: 0.0, aten.bernoulli: 1.0}
_ALIKE = tuple(_MIDDLE)
_FILLED = {aten.bernoulli_: 1.0, aten.uniform_: 0.5, aten.normal_: 0.0, aten.exponential_: 1.0}


def _without_dropout(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operation that has dropout within, with a chance of zero."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            if place < len(args):
                return func(*args[:place], 0.0, *args[place + 1 :], **kwargs)
            return func(*args, **{**kwargs, "dropout_p": 0.0})
    raise Inseparable(f"{func} draws random numbers")
