"""A pull of the weights to zero that is as strong as the path is noisy, and spares the weights that the loss needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .held_parts import ALL_HERE, AllHere

__all__ = ["Forgetting"]

_SURE = 2.0  # standard errors: a loss that falls so surely with a weight's length keeps it from the pull


class Forgetting:
    r"""The share of each weight that a step takes away, so that noise of the gradient does not pile up in it.

        share_l = noise * left^2 * spare_l / H

    - noise, from 0 to 1: -2 lead, the mean over the horizon, for a path that is a random walk has lead -1/2.
    - left, from 0 to 1: the loss in units of the first one. A network that fits is not to be held back.
    - spare_l, from 0 to 1: 1 + z_l / 2, where z_l is the mean of the slope <grad_l, weight_l> over the horizon in units
      of its standard error. Below 0 the loss wants the weight longer, and at -2 it is left alone. In front of a norm
      z_l is 0 but for noise.
    - H: the horizon, in steps.

    Only weights of two axes and more are pulled: zero is no natural place for a norm's gain, and biases are short.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._pulled = [position for position, leaf in enumerate(leaves) if leaf.ndim > 1]
        self._among = frozenset(self._pulled)
        device = leaves[0].device if leaves else torch.device("cpu")
        self.slopes = torch.zeros(2, len(self._pulled), dtype=torch.float64, device=device)  # mean, and mean square

    def pulls(self, position: int) -> bool:
        """Whether the weight there is pulled at all."""
        return position in self._among

    def take_over(self, other: Forgetting, before: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        """Go on with what ``other`` has seen of the leaves that were there ``before``, and are among these."""
        seen = {id(before[position]): column for column, position in enumerate(other._pulled)}
        for column, position in enumerate(self._pulled):
            if id(leaves[position]) in seen:
                self.slopes[:, column] = other.slopes[:, seen[id(leaves[position])]]

    def see(
        self,
        leaves: Sequence[Tensor],
        grads: Sequence[Tensor],
        horizon: Tensor,
        taken: Tensor,
        parts: AllHere = ALL_HERE,
    ) -> None:
        """Take the slopes along the weights into their means over the ``horizon``, if the step is ``taken``."""
        if not self._pulled:
            return
        slope = torch.stack([_product(leaves[position], grads[position]) for position in self._pulled])
        slope = parts.products(slope, self._pulled)
        found = torch.stack([slope, slope * slope])
        self.slopes.copy_(torch.where(taken, torch.lerp(self.slopes, found, 1 / horizon), self.slopes))

    def shares(self, lead: Tensor, left: Tensor, horizon: Tensor) -> dict[int, Tensor]:
        """By a weight's position, the share of it to take away; 0 where ``lead`` or ``left`` is not a number."""
        mean, square = self.slopes
        error = (square / (2 * horizon)).sqrt()  # of a mean that forgets, over the horizon
        spare = (1 + mean / error / _SURE).nan_to_num(nan=1.0).clamp(0, 1)
        strength = (-2 * lead).clamp(0, 1) * left.clamp(0, 1) ** 2 / horizon
        share = torch.where(torch.isfinite(strength), strength, 0.0) * spare
        return dict(zip(self._pulled, share.unbind(), strict=True))


def _product(one: Tensor, other: Tensor) -> Tensor:
    wide = torch.promote_types(one.dtype, torch.float32)  # a product of halves may be too large for one
    return (one.to(wide) * other.to(wide)).sum(dtype=torch.float64)
