"""A pull of the weights back to their first length, as strong as the path is noisy, that spares what the loss needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .held_parts import ALL_HERE, AllHere

__all__ = ["Forgetting"]

_ROWS, _START, _UNKNOWN = 4, 2, -1.0
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

    What noise has made longer is taken back, and no more: a weight is not pulled to less than its length at its first
    step, or what a pretrained model knows would be forgotten with the noise.

    Only weights of two axes and more are pulled: zero is no natural place for a norm's gain, and biases are short.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._pulled = [position for position, leaf in enumerate(leaves) if leaf.ndim > 1]
        self._among = frozenset(self._pulled)
        device = leaves[0].device if leaves else torch.device("cpu")
        # of the slopes the mean, and the mean square; of the weights the squared length at first, and as it is
        self.known = torch.zeros(_ROWS, len(self._pulled), dtype=torch.float64, device=device)
        self.known[_START] = _UNKNOWN

    def pulls(self, position: int) -> bool:
        """Whether the weight there is pulled at all."""
        return position in self._among

    def take_over(self, other: Forgetting, before: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        """Go on with what ``other`` has seen of the leaves that were there ``before``, and are among these."""
        seen = {id(before[position]): column for column, position in enumerate(other._pulled)}
        for column, position in enumerate(self._pulled):
            if id(leaves[position]) in seen:
                self.known[:, column] = other.known[:, seen[id(leaves[position])]]

    def load(self, rows: list[list[float]]) -> None:
        """Go on with the rows of a state; one from before there were lengths has two."""
        self.known.zero_()  # so that any length is more than at first, as it was then
        self.known[: len(rows)] = torch.tensor(rows, dtype=torch.float64, device="cpu")

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
        products = torch.cat([self._products(leaves, grads), self._products(leaves, leaves)])
        slope, length = parts.products(products, [*self._pulled, *self._pulled]).chunk(2)
        mean, square, start, _ = self.known
        found = [torch.lerp(mean, slope, 1 / horizon), torch.lerp(square, slope * slope, 1 / horizon)]
        found += [torch.where(start < 0, length, start), length]
        self.known.copy_(torch.where(taken, torch.stack(found), self.known))

    def _products(self, ones: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        return torch.stack([_product(ones[position], others[position]) for position in self._pulled])

    def shares(self, forget: float, lead: Tensor, left: Tensor, horizon: Tensor) -> dict[int, Tensor]:
        """By a weight's position, the share of it to take away; 0 where ``lead`` or ``left`` is not a number.

        ``forget`` multiplies the pull.
        """
        mean, square, start, length = self.known
        error = (square / (2 * horizon)).sqrt()  # of a mean that forgets, over the horizon
        spare = (1 + mean / error / _SURE).nan_to_num(nan=1.0).clamp(0, 1)
        strength = (-2 * lead).clamp(0, 1) * left.clamp(0, 1) ** 2 / horizon
        most = (1 - (start / length).sqrt()).nan_to_num(nan=0.0).clamp(0, 1)
        share = torch.minimum(forget * torch.where(torch.isfinite(strength), strength, 0.0) * spare, most)
        return dict(zip(self._pulled, share.unbind(), strict=True))


def _product(one: Tensor, other: Tensor) -> Tensor:
    wide = torch.promote_types(one.dtype, torch.float32)  # a product of halves may be too large for one
    return (one.to(wide) * other.to(wide)).sum(dtype=torch.float64)
