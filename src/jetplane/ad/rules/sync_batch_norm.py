"""torch.nn.SyncBatchNorm: a batch norm whose statistics are those of all processes' samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..algebra.families import composite
from .collectives import summed


def _sync_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    momentum: float,
    group: Any,
    size: int,
) -> Tensor:
    """(B, C, ...), with two sums over processes: of entries and their number, then of the squares around the mean."""
    channels, axes = x.shape[1], [axis for axis in range(x.ndim) if axis != 1]
    shape = [1, channels] + [1] * (x.ndim - 2)
    number = x.new_full((1,), x.numel() // channels)
    *_, total = sums = summed(torch.cat([x.sum(axes), number]), group).split([channels, 1])
    mean = sums[0] / total
    centred = x - mean.reshape(shape)
    var = summed(centred.square().sum(axes), group) / total
    y = centred * torch.rsqrt(var + eps).reshape(shape)
    for running, now in ((running_mean, mean), (running_var, var * (total / (total - 1)))):
        if running is not None:
            running.mul_(1 - momentum).add_(now.detach() * momentum)
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


composite("torch.nn.modules._functions.SyncBatchNorm", _sync_batch_norm)
