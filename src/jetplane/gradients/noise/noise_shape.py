r"""How the noise of a site is shaped where it enters, and how that is undone where it is multiplied back.

White noise u enters as apply(u) = S u, and makes the scalar s = g . S u, with the derivative g at the site. What comes
back is s times the white noise itself, E[s u] = S^T g. So the inverse that is wanted is that of the transpose,

    undo = S^-T        E[undo(u) apply(u)^T] = 1

on the entries that noise enters at. S is a product: how long all noise of a site is, how long that of each token is,
and where there is none because nothing depends on it there. Both ways take the parts in this order, as S^-T = (A B)^-T
= A^-T B^-T. A sample's own weights (:mod:`jetplane.gradients.plan.own_weights`) come last, where there are some, with
an ``apply`` and an ``undo`` of the same meaning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..adjoints.adjoint import both
from ..plan.noise_plan import Site
from .balance import sizes

__all__ = ["NoiseShape"]


@dataclass(frozen=True, eq=False)
class NoiseShape:
    """The map S of one site in one call. None stands for 1, everywhere.

    Example:
        >>> import torch
        >>> shape = NoiseShape(length=torch.tensor(2.0), live=torch.tensor([True, False]))
        >>> u = torch.tensor([[1.0, -1.0]])
        >>> shape.apply(u), shape.undo(u)
        (tensor([[2., -0.]]), tensor([[0.5000, -0.0000]]))
    """

    length: Tensor | None = None  # (), of all noise of the site
    size: Tensor | None = None  # broadcasts to S: of each token's, beside the others'
    live: Tensor | None = None  # broadcasts to S: where the losses can depend on the site
    alive: Tensor | None = None  # likewise: where the layers can, by the site's own functions

    @staticmethod
    def of(site: Site, activation: Tensor, length: Tensor | None, alive: Tensor | None) -> NoiseShape:
        """That of a site with this activation."""
        return NoiseShape(length, sizes(site, activation), site.live, alive)

    def apply(self, rows: Tensor) -> Tensor:
        """S u: white noise (K, *S) as it enters. The small factors are multiplied first."""
        factors = [part.to(rows.dtype) for part in (self.length, self._mask(rows), self.size) if part is not None]
        return rows * math.prod(factors[1:], start=factors[0]) if factors else rows

    def undo(self, found: Tensor, known: Tensor | None = None) -> Tensor:
        """S^-T of a sum of white noise (*S), each times its scalar; ``known`` is what the scalars lack of the result.

        Where the layers cannot reach the site nothing has to be undone: its own functions have no derivative there.
        """
        for part in (self.length, self.size):
            found = found if part is None else found / part.to(found.dtype)
        found = found if known is None else known + found
        return found if self.live is None else found * self.live.to(found.dtype)

    def pattern(self, like: Tensor) -> Tensor | None:
        """What noise of the shape of ``like`` is multiplied by, but for the length: of truth values, or numbers."""
        mask = self._mask(like.unsqueeze(0))
        if self.size is None:
            return mask
        return self.size.expand(like.shape) if mask is None else mask * self.size

    def _mask(self, rows: Tensor) -> Tensor | None:
        """Where noise enters, for rows (K, *S)."""
        return both(self.alive, None if self.live is None else self.live.expand(rows.shape[1:]))
