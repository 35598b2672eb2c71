"""Whether numbers are finite, asked of many tensors at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["finite"]

_FEW = 16  # entries, up to which Python is faster than an operation


def finite(tensors: Sequence[Tensor]) -> bool:
    """Whether every entry of all tensors is finite. The host waits for each device once.

    Example:
        >>> finite([torch.ones(2)]), finite([torch.ones(2), torch.tensor([float("inf")])])
        (True, False)
    """
    tensors = [torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t.detach() for t in tensors]
    if all(tensor.numel() <= _FEW and tensor.is_cpu for tensor in tensors):
        return all(map(math.isfinite, [number for tensor in tensors for number in tensor.flatten().tolist()]))
    # A sum is not finite where an entry is not: one pass over each tensor, and no second one of the same size.
    sums: dict[torch.device, Tensor] = {}
    for tensor in tensors:
        one = tensor.sum()
        sums[tensor.device] = sums[tensor.device] + one if tensor.device in sums else one
    if all(math.isfinite(float(one)) for one in sums.values()):
        return True
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)  # or finite ones whose sum overflows
