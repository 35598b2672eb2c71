"""The one-dimensional equation behind the trust region and the cubic model.

In the axes of H the step with the shift mu is c_i = -y_i / (w_i + mu). The shift is written mu = least + t, where
``least`` = max(0, -w_1) is the smallest one that makes H + mu I positive semidefinite: the gaps w_i + least are then
exact, and zero for the lowest axis of an indefinite H, and t keeps all its digits however small it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .base import Spectrum, length


def shifted(found: Spectrum, radius: Callable[[Tensor], Tensor], upper: float) -> Tensor:
    """The step c, in the plane's own axes, with |c| = radius(mu) and the shift mu >= least.

    ``radius`` must not decrease, and the root must have mu - least <= ``upper``. Where even mu = least gives
    a shorter step, that step is lengthened along the lowest axis (the hard case) if H is indefinite; with least = 0
    it is the free minimiser, and stays as it is.
    """
    least = max(0.0, -float(found.values[0]))
    gaps = found.values + least
    limit = radius(torch.tensor([least], dtype=gaps.dtype, device=gaps.device))
    # An axis without slope takes no part, even where its gap is zero.
    gaps, slope = torch.where(found.slope == 0, 1.0, gaps), found.slope
    if bool(length(slope / gaps) <= limit):
        inside = -(slope / gaps)
        return found.vectors @ (_lengthen(inside, float(limit)) if least > 0 and float(limit) > 0 else inside)
    t = _root(lambda t: length(slope / (gaps + t[:, None])) > radius(least + t), upper)
    return -(found.vectors @ (slope / (gaps + t)))


def _lengthen(inside: Tensor, radius: float) -> Tensor:
    """The vector of the length ``radius`` that differs along the lowest axis only."""
    rest = min(1.0, float(length(inside)) / radius)
    lowest = radius * math.sqrt((1 - rest) * (1 + rest))
    return torch.cat([torch.full_like(inside[:1], lowest), inside[1:]])


def _root(before: Callable[[Tensor], Tensor], upper: float) -> float:
    """The t in (0, upper] where ``before`` turns from true to false: a search in log t, 64 points at a time."""
    numbers = torch.finfo(torch.float64)
    high = math.log(min(max(upper, 2 * numbers.tiny), numbers.max / 2)) + 1e-9
    low = math.log(numbers.tiny)
    for _ in range(10):  # 700 / 63^10 is far below rounding
        grid = torch.linspace(low, high, 64, dtype=torch.float64, device="cpu")
        count = int(before(grid.exp()).sum())
        low, high = float(grid[max(count - 1, 0)]), float(grid[min(count, 63)])
        if not low < high:
            break
    return math.exp((low + high) / 2)
