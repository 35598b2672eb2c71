"""A batch in parts of its samples, whose estimates add up to that of the whole, in a part of its memory.

A sample's noise goes to its own loss alone, so nothing is computed twice for it: tangents in chunks, the other way to
save memory, have the program run once more for each chunk. That losses are those of samples, whatever else is in the
batch, is looked at: a part must have the losses that the whole has there, and what comes beside them as well. Random
numbers, which parts draw for themselves, are left out of that comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...ad import _torch
from ...ad.draws import draws
from ...ad.run.replay import Replay
from ...compiler.several import in_batch
from ..program.loss_program import LossProgram

__all__ = ["Division", "Inseparable", "ShardOf", "agree", "alike", "can_be_cut", "put_together"]

aten = torch.ops.aten


class Inseparable(Exception):
    """The samples of a batch cannot be taken in parts."""


@dataclass(frozen=True)
class Division:
    """How a batch is taken in parts."""

    samples: int  # of the whole
    size: int  # samples of a part; the last one may have fewer
    tangents: int  # J of each sample

    @property
    def count(self) -> int:
        """How many parts there are."""
        return -(-self.samples // self.size)

    @property
    def even(self) -> bool:
        """Whether all have as many samples."""
        return self.samples % self.size == 0

    def part(self, batch: Sequence[Any], number: int = 0) -> tuple[Any, ...]:
        """The tensors of a batch with a part of their samples; others stay.

        Example:
            >>> Division(5, 2, 8).part((torch.arange(5), torch.ones(2), "a word"), 1)
            (tensor([2, 3]), tensor([1., 1.]), 'a word')
            >>> Division(5, 2, 8).part([{"x": torch.arange(5)}], 2)
            ({'x': tensor([4])},)
        """
        start = number * self.size

        def cut(tensor: Tensor) -> Tensor:
            return tensor[start : start + self.size] if _has(tensor, self.samples) else tensor

        return in_batch(cut, batch)

    def parts(self, batch: Sequence[Any]) -> list[tuple[Any, ...]]:
        """All parts of a batch."""
        return [self.part(batch, number) for number in range(self.count)]


@dataclass(frozen=True)
class ShardOf(Division):
    """A process's samples, as they are, of a batch that several processes have: the one part that it takes."""

    @property
    def count(self) -> int:
        return 1

    def part(self, batch: Sequence[Any], number: int = 0) -> tuple[Any, ...]:
        return tuple(batch)


def can_be_cut(batch: Any, samples: int) -> bool:
    """Whether a batch holds tensors with an entry for each sample."""
    return any(isinstance(leaf, Tensor) and _has(leaf, samples) for leaf in _torch.pytree.tree_leaves(batch))


def _has(tensor: Tensor, samples: int) -> bool:
    return tensor.ndim > 0 and tensor.shape[0] == samples


def agree(program: LossProgram, division: Division, devices: Sequence[torch.device]) -> bool:
    """Whether the parts of a batch have the losses that they have in the whole, and what comes beside them."""
    replay = Replay(devices)

    def found(given: Sequence[Any]) -> tuple[Tensor, Any]:
        def run() -> tuple[Tensor, Any]:
            with torch.no_grad(), _Still():
                return replace(program, batch=given)()

        out: tuple[Tensor, Any] = replay.run(run)
        return out

    try:
        whole = found(program.batch)
        parts = [found(part) for part in division.parts(program.batch)]
        return _same(put_together(parts, division), whole)
    except Exception:  # whatever it is, the program does not take parts of its batch
        return False
    finally:
        replay.rewind()


def put_together(parts: Sequence[Any], division: Division) -> Any:
    """What the parts of a batch have given, trees: tensors one behind the other, and words, which all of them have.

    Raises Inseparable for numbers, and for tensors that have not an entry for each sample: whether they are a sum, a
    mean or the largest of something, or none of the samples' business, does not follow from what they are.

    Example:
        >>> put_together([(torch.ones(2), "seen"), (torch.zeros(1), "seen")], Division(3, 2, 8))
        (tensor([1., 1., 0.]), 'seen')
    """
    starts = range(0, division.samples, division.size)
    sizes = [min(division.size, division.samples - start) for start in starts]

    def joined(*some: Any) -> Any:
        if some[0] is None or (isinstance(some[0], str) and set(some) == {some[0]}):
            return some[0]
        if not all(isinstance(one, Tensor) and _has(one, size) for one, size in zip(some, sizes, strict=True)):
            raise Inseparable(f"{some[0]!r} has not an entry for each sample")
        return torch.cat(some)

    leaves, structures = zip(*map(_torch.pytree.tree_flatten, parts), strict=True)
    if any(structure != structures[0] for structure in structures):
        raise Inseparable("aux has another structure in another part")
    return _torch.pytree.tree_unflatten([joined(*some) for some in zip(*leaves, strict=True)], structures[0])


def _same(one: Any, other: Any) -> bool:
    """Whether two trees have the same numbers in the same places, but for rounding."""
    (ours, structure), (others, another) = map(_torch.pytree.tree_flatten, (one, other))
    return structure == another and all(
        alike(mine, its) if isinstance(mine, Tensor) else mine == its for mine, its in zip(ours, others, strict=True)
    )


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether numbers are the same but for rounding, which depends on how many there are."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.numel() or not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
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
