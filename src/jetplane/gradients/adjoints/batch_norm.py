"""Batch norm, y = weight (x - mean) / deviation + bias, with mean and deviation of the batch or given ones.

In training every sample's y depends on the others' x, by the two statistics of each channel alone. With the normalised
x^ = (x - mean) / deviation, M numbers in a channel, and the derivative g at y, that at x is

    weight / deviation (g - (d_0 + d_1 x^) / M)        d = (sum g, sum g x^), of the channel

of which the first term is what there would be were the statistics fixed. Likewise a tangent of sample b alone changes
the losses by what it does to them with the statistics fixed, less ``along`` of it times d.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ad.algebra.registry import argument_names
from ..program.done import Done
from .adjoint import lookup

__all__ = ["along", "fixed", "normalised", "pull", "read", "uses_batch"]

aten = torch.ops.aten


def uses_batch(func: Any, args: Any) -> bool:
    """Whether an operation normalises by the statistics of the batch."""
    if not lookup(func).norms_batch:
        return False
    given = dict(zip(argument_names(func), args, strict=False))
    if "training" not in given:
        return func is aten._batch_norm_with_update.default
    return bool(given["training"]) or given.get("running_mean") is None


def normalised(done: Done) -> Tensor:
    """x^ (B, C, ...)."""
    mean, rate = _statistics(done)
    return (done.args[0] - _across(mean, done)) * _across(rate, done)


def fixed(done: Done, rows: Tensor) -> Tensor:
    """Tangents (..., B, C, ...) of the result for those of x, were the statistics fixed; and the other way round."""
    _, rate = _statistics(done)
    weight = done.args[1]
    return (rows * _across(rate if weight is None else rate * weight, done)).to(rows.dtype)


def read(done: Done, rows: Tensor) -> Tensor:
    """For rows (K, B, C, ...) at the result: their sums (K, B, 2C) over a sample's channel, and those of rows x^."""
    axes = list(range(3, rows.ndim))
    sums = [rows, rows * normalised(done)]
    return torch.cat([one.sum(axes) if axes else one for one in sums], 2)


def along(done: Done, rows: Tensor) -> Tensor:
    """What d, of all channels, is multiplied by for tangents (K, B, C, ...) of x: (K, B, 2C)."""
    x = done.args[0]
    return read(done, fixed(done, rows)) / (x.numel() // x.shape[1])


def pull(delta: Tensor, done: Done, path: Any) -> Tensor:
    """The derivative at x."""
    if uses_batch(done.func, done.args):
        x = done.args[0]
        sums = read(done, delta.unsqueeze(0)).sum((0, 1)) / (x.numel() // x.shape[1])
        first, second = sums.chunk(2)
        delta = delta - (_across(first, done) + _across(second, done) * normalised(done)).to(delta.dtype)
    return fixed(done, delta)


def _across(numbers: Tensor, done: Done) -> Tensor:
    """One number for each channel, to be broadcast against x."""
    return numbers.reshape(-1, *(1,) * (done.args[0].ndim - 2))


def _statistics(done: Done) -> tuple[Tensor, Tensor]:
    """Mean and 1 / deviation that the values were normalised with."""
    if uses_batch(done.func, done.args):
        return done.out[1], done.out[2]
    bound = done.bound()
    return bound["running_mean"], (bound["running_var"] + bound.get("eps", bound.get("epsilon"))).rsqrt()
