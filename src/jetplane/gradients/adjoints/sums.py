r"""Sums of derivatives, as those of whatever was broadcast: of a sum that is nothing but rounding, zero is left.

A bias in front of a norm changes nothing, nor do one of attention's keys, or a number that is added to all logits: the
terms of its gradient cancel, and what is left of them is their rounding errors. Adam divides a gradient by its size, so
such an error moves the parameter as far as a gradient would, another way on another machine. An error of a sum of terms
t is of the size of eps sum |t|: below a few of these, nothing is known of the sum, not even its sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["summed", "total"]

_ERRORS = 16.0  # of eps sum |t|; terms that cancel are themselves results of some operations, each of which rounds
_FINE = 1e-6  # eps; that of halves is beyond what is learned from


def total(terms: Tensor, axes: list[int], known: Tensor | None = None) -> Tensor:
    """The sum over some axes, where it is more than rounding, and else 0; ``known`` is the sum where there is one.

    Example:
        >>> total(torch.tensor([[0.1, 1.0], [0.2, 1.0], [-0.3, 1.0]]), [0])
        tensor([0., 3.])
    """
    if not axes:  # torch takes none for all of them
        return terms if known is None else known
    found = terms.sum(axes) if known is None else known
    if not terms.is_floating_point() or torch.finfo(terms.dtype).eps > _FINE:
        return found
    size = torch.linalg.vector_norm(terms, 1, axes)
    rounding = found.abs() < _ERRORS * torch.finfo(terms.dtype).eps * size
    return torch.where(rounding & torch.isfinite(size), 0.0, found)


def summed(delta: Tensor, like: Tensor) -> Tensor:
    """The derivative at an argument that was broadcast."""
    if delta.shape == like.shape:
        return delta
    lead = delta.ndim - like.ndim
    axes = [axis for axis in range(delta.ndim) if axis < lead or like.shape[axis - lead] < delta.shape[axis]]
    return total(delta, axes).reshape(like.shape)
