"""What a step knows of the curvature in its plane: nothing, or all of it.

A curvature says which second-order terms the pass carries, and reads the quadratic model from the loss's jet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .ad.jet import Jet, PairSet, Quadratic

__all__ = ["Curvature", "ExactHessian", "NoCurvature"]


@runtime_checkable
class Curvature(Protocol):
    """The second-order part of the model of a step."""

    def pairs(self, k: int) -> PairSet:
        """The second-order terms that the pass carries for K directions."""
        ...

    def model(self, jet: Jet, pairs: PairSet) -> Quadratic:
        """The model in the plane, from the jet of the scalar loss along ``pairs``."""
        ...


@dataclass(frozen=True)
class NoCurvature:
    """First order only: slope V g, curvature zero.

    Example:
        >>> jet = Jet(torch.tensor(1.0), torch.tensor([2.0, 3.0]), None)
        >>> NoCurvature().model(jet, NoCurvature().pairs(2)).curvature
        tensor([[0., 0.],
                [0., 0.]])
    """

    def pairs(self, k: int) -> PairSet:
        return PairSet.none(k)

    def model(self, jet: Jet, pairs: PairSet) -> Quadratic:
        return _read(jet, pairs)


@dataclass(frozen=True)
class ExactHessian:
    """The projected Hessian: slope V g, curvature V H V^T, exact.

    Example:
        >>> jet = Jet(torch.tensor(1.0), torch.tensor([2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0]))
        >>> ExactHessian().model(jet, ExactHessian().pairs(2)).curvature
        tensor([[4., 5.],
                [5., 6.]])
    """

    def pairs(self, k: int) -> PairSet:
        return PairSet.all(k)

    def model(self, jet: Jet, pairs: PairSet) -> Quadratic:
        return _read(jet, pairs)


def _read(jet: Jet, pairs: PairSet) -> Quadratic:
    if jet.primal.numel() != 1:
        raise ValueError(f"the loss has shape {tuple(jet.primal.shape)}; expected a single number.")
    loss = jet.primal.reshape(())
    slope = loss.new_zeros(pairs.k) if jet.tangent is None else jet.tangent.reshape(-1)
    if jet.second is None:
        return Quadratic(loss, slope, loss.new_zeros(pairs.k, pairs.k))
    return Quadratic(loss, slope, pairs.matrix(jet.second.reshape(-1)))
