"""Sums of directions with coefficients on CUDA, and whole steps along Gaussian directions: in one order everywhere.

    sum_k c_k v_k = (...((c_0 v_0) + c_1 v_1) + ...) + c_K-1 v_K-1

each product and each sum rounded by itself. A library's product of a vector and a matrix adds in an order of its own,
may round the factors first (TF32), and does other things elsewhere. Kernels where Triton is there, plain operations
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import traced
from .counter import signed, working_dtype

__all__ = ["along", "in_order"]


def in_order(coefficients: Tensor, rows: Tensor) -> Tensor:
    """sum_k c_k v_k for coefficients (K,) and rows (K, n): (n,); short dtypes are added up in float32.

    Example:
        >>> in_order(torch.tensor([2.0, 3.0]), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor([5., 3.])
    """
    if traced.fast(rows.device):
        from . import kernels

        return kernels.in_order(coefficients, rows)
    wide = working_dtype(rows.dtype)
    numbers = coefficients.to(wide)
    total = rows[0].to(wide) * numbers[0]
    for row, number in zip(rows[1:], numbers[1:], strict=True):
        total += row.to(wide) * number
    return total.to(rows.dtype)


def along(
    leaf: Tensor,
    seed: int,
    steps: list[int],
    position: int,
    shares: Tensor,
    factors: Tensor,
    delta_of: Callable[[int, Tensor], Tensor],
) -> None:
    """Move a parameter by several steps, one after the other: leaf <- factor (sum_k share_k v_k) + leaf.

    ``shares`` (S, K) and ``factors`` (S,) are on the CPU; v_k are the Gaussian rows of its ``position`` at each of the
    ``steps`` (S,). ``delta_of`` gives the sum of a step where there is no kernel.
    """
    if traced.fast(leaf.device) and leaf.dtype in (torch.float32, torch.float64):
        from . import kernels

        whole = leaf.reshape(-1).contiguous()
        words = torch.tensor([signed(seed), *steps], device="cpu").to(leaf.device)
        numbers = torch.cat([shares.to(leaf.dtype), factors.to(leaf.dtype).unsqueeze(1)], 1).to(leaf.device)
        kernels.along(whole, words, position, numbers)
        leaf.copy_(whole.view_as(leaf))
        return
    for step, some, factor in zip(steps, shares, factors.tolist(), strict=True):
        delta = delta_of(step, some)
        leaf.add_(delta if factor == 1.0 else delta.mul_(factor))
