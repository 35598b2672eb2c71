"""What the arguments of ``step`` mean: a function with its batch, or closures for the parts of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ad.run.auxiliary import split_aux
from ...ad.run.casting import Casts
from ..batch_parts import parts_of

__all__ = ["LossCall", "calls_of", "cast", "losses_of", "mean_of"]

_WANTED = "a function that returns the losses of a batch's samples"


class LossCall(NamedTuple):
    """A function of a batch that returns one loss for each sample."""

    function: Callable[..., Any]
    batch: tuple[Any, ...]


def calls_of(closure: Any, batch: tuple[Any, ...]) -> list[LossCall]:
    """The calls whose losses, averaged, are those of a step."""
    return [LossCall(*part) for part in parts_of(closure, batch, _WANTED)]


def cast(calls: Sequence[LossCall], casts: Casts) -> list[LossCall]:
    """The calls with autocast as it was around the step."""
    return [LossCall(casts.around(function), batch) for function, batch in calls]


def losses_of(calls: Sequence[LossCall], has_aux: bool) -> Tensor:
    """The losses of all samples (B,), with weights by which their mean is that of the calls' means."""
    parts = [_losses(call, has_aux) for call in calls]
    if len(parts) == 1:
        return parts[0]
    count = sum(len(part) for part in parts)
    return torch.cat([part * (count / (len(parts) * len(part))) for part in parts])


def _losses(call: LossCall, has_aux: bool) -> Tensor:
    losses: Tensor = split_aux(call.function(*call.batch), has_aux, "the closure", "loss")[0]
    return _by_sample(losses)


def mean_of(losses: Tensor) -> Tensor:
    """The mean over samples of losses (B,) or (B, ...)."""
    return _by_sample(losses).mean()


def _by_sample(losses: Tensor) -> Tensor:
    return losses if losses.ndim < 2 else losses.flatten(1).sum(1)
