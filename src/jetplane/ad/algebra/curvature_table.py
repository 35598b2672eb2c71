"""The curvatures by name: how far second order is carried, and how the quadratic model is read from the loss's jet.

The transforms and the optimizers take the same names and read the same models; this is where both look.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from .jet import Jet, PairSet, Quadratic

__all__ = ["CURVATURES", "Entry", "Order", "entry"]


class Order(Enum):
    """Which second-order terms a pass carries."""

    EXACT = "exact"  # all, from the parameters on
    LATE = "late"  # all, from the model's output on
    FIRST = "first"  # none


@dataclass(frozen=True)
class Entry:
    """What is to be known of a curvature. ``each``: its loss is one number for each sample (B,), not a scalar."""

    order: Order
    read: Callable[[Jet, PairSet], Quadratic]
    each: bool = False

    @property
    def late(self) -> bool:
        """Whether second order begins at the loss."""
        return self.order is Order.LATE

    def pairs(self, k: int) -> PairSet:
        """The second-order terms that the pass carries for K directions."""
        return PairSet.none(k) if self.order is Order.FIRST else PairSet.all(k)


def entry(name: str) -> Entry:
    """The entry of this name.

    Example:
        >>> entry("ggn").order
        <Order.LATE: 'late'>
    """
    if name not in CURVATURES:
        close = difflib.get_close_matches(str(name).lower(), CURVATURES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"curvature is {name!r}; expected one of {', '.join(map(repr, CURVATURES))}.{hint}")
    return CURVATURES[name]


# -- models -------------------------------------------------------------------------------------------------------


def _carried(jet: Jet, pairs: PairSet) -> Quadratic:
    """The model with the second-order terms of the jet, zero where there are none."""
    single = jet.primal.numel() == 1
    if not single and (jet.primal.ndim != 1 or not jet.primal.numel()):
        raise ValueError(
            f"the loss has shape {tuple(jet.primal.shape)}; expected a single number, or one for each sample (B,)."
        )
    if single:  # a mean would only take time
        return _single(jet, pairs)
    loss = jet.primal.reshape(-1).mean()
    if jet.tangent is None:
        slope, noise = loss.new_zeros(pairs.k), None
    else:
        slopes = jet.tangent.reshape(pairs.k, -1)
        slope, noise = slopes.mean(1), _noise(slopes)
    if jet.second is None or not pairs.rows:
        return Quadratic(loss, slope, loss.new_zeros(pairs.k, pairs.k), noise)
    return Quadratic(loss, slope, pairs.matrix(jet.second.reshape(pairs.rows, -1).mean(1)), noise)


def _single(jet: Jet, pairs: PairSet) -> Quadratic:
    """The model where the loss is one number."""
    loss = jet.primal.reshape(())
    slope = loss.new_zeros(pairs.k) if jet.tangent is None else jet.tangent.reshape(pairs.k)
    if jet.second is None or not pairs.rows:
        return Quadratic(loss, slope, loss.new_zeros(pairs.k, pairs.k))
    return Quadratic(loss, slope, pairs.matrix(jet.second.reshape(pairs.rows)))


def _noise(slopes: Tensor) -> Tensor:
    """The covariance (K, K) of the mean of per-sample slopes (K, B), estimated from them."""
    centred = slopes - slopes.mean(1, keepdim=True)
    count = slopes.shape[1]
    return centred @ centred.T / (count * (count - 1))


def _second_moment(jet: Jet, pairs: PairSet) -> Quadratic:
    """The model whose curvature is (1/B) S S^T of the slopes S (K, B) of single samples."""
    if jet.primal.ndim != 1:
        raise ValueError(
            f"the loss has shape {tuple(jet.primal.shape)}; the empirical Fisher is made of the slopes of single "
            "samples, expected one loss for each of them (B,), as with reduction='none'."
        )
    plain = _carried(jet, pairs)
    slopes = jet.tangent
    return Quadratic(plain.loss, plain.slope, slopes @ slopes.T / slopes.shape[1], plain.noise)


CURVATURES = {
    "exact": Entry(Order.EXACT, _carried),
    "ggn": Entry(Order.LATE, _carried),
    "fisher": Entry(Order.FIRST, _second_moment, each=True),
    "none": Entry(Order.FIRST, _carried),
}
