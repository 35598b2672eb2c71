"""Batches of a few shapes in place of many: what is compiled, or planned, for each shape is then made a few times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Buckets"]


@dataclass(frozen=True)
class Buckets:
    r"""Pads batches up to a few shapes, and says what each sample weighs.

    ``buckets(batch)`` is the pair (padded batch, weight), where ``batch`` is a tensor, a tuple or list of tensors, or
    a mapping of names to tensors, all with the samples along their first axis.

    - **Lengths.** What ``fill`` has a number for gets it at the end of its axis ``axis``, up to the next one of
      ``lengths``, or, where that is a number, up to a multiple of it. ``fill`` is a mapping where the batch is one, and
      else in its order, with None for what has no lengths. The program has to leave out what is filled up, by its mask
      or its labels, as it does for the shorter ones of a batch.
    - **Samples.** A batch of fewer than ``samples``, as the last one of an epoch, is filled up with copies of its own
      samples, from the first one on: they are samples like any other, and their losses are finite.
    - **Weight** (samples,) is samples / B for the B samples of the batch and 0 for the copies, so that

          mean_b' weight_b' loss_b' = mean_b loss_b

      and with it gradient, slopes and curvatures are those of the batch as it was. All are 1 where nothing is filled
      up. Its dtype is that of the batch's first tensor of floating point, or torch's default. Only what couples
      samples, as a batch norm in training, sees the copies.

    Example:
        >>> import torch
        >>> buckets = Buckets(samples=4, lengths=(8, 16), fill={"tokens": 0, "labels": -100})
        >>> batch = {"tokens": torch.ones(3, 11, dtype=torch.int64), "labels": torch.ones(3, 11, dtype=torch.int64)}
        >>> padded, weight = buckets(batch)
        >>> padded["tokens"].shape, weight
        (torch.Size([4, 16]), tensor([1.3333, 1.3333, 1.3333, 0.0000]))
    """

    samples: int | None = None  # None: as many as there are
    lengths: int | Sequence[int] | None = None  # None: as they are
    fill: Any = None
    axis: int = 1

    def __post_init__(self) -> None:
        _check_count("samples", self.samples)
        if isinstance(self.lengths, Sequence):
            known = list(self.lengths)
            if not known or any(not _is_count(one) for one in known) or sorted(set(known)) != known:
                raise ValueError(f"lengths is {self.lengths!r}; expected positive whole numbers that rise.")
        else:
            _check_count("lengths", self.lengths)
        if (self.lengths is None) != (self.fill is None):
            raise ValueError(
                f"lengths is {self.lengths!r} and fill {self.fill!r}; expected both, what is to be filled up and with "
                "what, or none."
            )
        if self.axis < 1:
            raise ValueError(f"axis is {self.axis}; expected 1 or more, for the samples are along axis 0.")

    def __call__(self, batch: Any) -> tuple[Any, Tensor]:
        """The batch in one of the few shapes, and the weight (samples,) of each of its samples."""
        parts, fills = self._parts(batch)
        count = _samples(parts)
        length = self._length(parts, fills)
        short = (self.samples or count) - count
        if short < 0:
            raise ValueError(f"the batch has {count} samples; expected at most {self.samples}, as samples says.")
        copied = torch.arange(count + short) % count
        made = {}
        for name, part in parts.items():
            long = part if fills[name] is None else _filled(part, self.axis, length, fills[name])
            made[name] = long[copied.to(long.device)] if short else long
        return _like(batch, made), _weight([*parts.values()], count, short)

    def _parts(self, batch: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """The tensors of a batch by name or place, and what each is to be filled up with."""
        parts = _named(batch)
        fills = {} if self.fill is None else _named(self.fill)
        beyond = [name for name in fills if name not in parts]
        alike = self.fill is None or isinstance(self.fill, Mapping) == isinstance(batch, Mapping)
        if beyond or not alike:
            raise ValueError(f"fill has {list(fills)} and the batch {list(parts)}; expected parts of the batch.")
        return parts, {name: fills.get(name) for name in parts}

    def _length(self, parts: Mapping[Any, Tensor], fills: Mapping[Any, Any]) -> int:
        """That to which all are filled up; 0 where none is."""
        found = {self._along(part) for name, part in parts.items() if fills[name] is not None}
        if len(found) > 1:
            raise ValueError(f"the lengths in one batch are {sorted(found)}; expected one, along axis {self.axis}.")
        if self.lengths is None or not found:
            return 0
        (length,) = found
        if not isinstance(self.lengths, Sequence):
            return -(-length // self.lengths) * self.lengths
        enough = [one for one in self.lengths if one >= length]
        if not enough:
            raise ValueError(
                f"a length is {length} and the largest bucket {self.lengths[-1]}; expected no longer ones, cut off "
                "before, or one bucket more."
            )
        return enough[0]

    def _along(self, part: Tensor) -> int:
        """How long it is."""
        if part.ndim <= self.axis:
            raise ValueError(
                f"a tensor of shape {tuple(part.shape)} is to be filled up along axis {self.axis}; expected one that "
                "has it, or None for it in fill."
            )
        return part.shape[self.axis]


def _named(parts: Any) -> dict[Any, Any]:
    """By name, or by place; what stands alone has the place 0."""
    if isinstance(parts, Mapping):
        return dict(parts)
    return dict(enumerate(parts)) if isinstance(parts, tuple | list) else {0: parts}


def _like(batch: Any, made: dict[Any, Tensor]) -> Any:
    """The parts, put together as those of the batch were."""
    if isinstance(batch, Mapping):
        return made
    parts = list(made.values())
    if isinstance(batch, tuple | list):
        return parts if isinstance(batch, list) else tuple(parts)
    return parts[0]


def _samples(parts: Mapping[Any, Any]) -> int:
    """How many there are in a batch."""
    shapes = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts.values()]
    counts = {shape[0] if isinstance(shape, tuple) and shape else None for shape in shapes}
    if len(counts) != 1 or not all(counts):
        raise ValueError(f"the batch is {shapes}; expected tensors with their samples along the first axis.")
    return int(counts.pop() or 0)


def _filled(part: Tensor, axis: int, length: int, number: Any) -> Tensor:
    more = length - part.shape[axis]
    if not more:
        return part
    return torch.cat([part, part.new_full((*part.shape[:axis], more, *part.shape[axis + 1 :]), number)], axis)


def _weight(parts: Sequence[Tensor], count: int, short: int) -> Tensor:
    dtype = next((part.dtype for part in parts if part.is_floating_point()), torch.get_default_dtype())
    weight = torch.full((count + short,), (count + short) / count, dtype=dtype, device=parts[0].device)
    weight[count:] = 0
    return weight


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_count(name: str, value: object) -> None:
    if value is not None and not _is_count(value):
        raise ValueError(f"{name} is {value!r}; expected a positive whole number, or None.")
