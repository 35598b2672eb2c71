"""What a step knows of the curvature in its plane: nothing, all of it, or the part that makes it positive.

A curvature says which second-order terms the pass carries and where they begin, and reads the quadratic model from the
jet of the loss: a single number, or one loss for each sample, whose mean it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from .ad.algebra.curvature_table import CURVATURES, entry
from .ad.algebra.jet import Jet, PairSet, Quadratic

__all__ = [
    "Curvature",
    "EmpiricalFisher",
    "ExactHessian",
    "GaussNewton",
    "NoCurvature",
    "find",
    "is_late",
]


@runtime_checkable
class Curvature(Protocol):
    """The second-order part of the model of a step.

    One whose second order begins at the loss says so by an attribute ``late = True``; without it, it begins at once.
    One that has no use for the losses of single samples (B,) says ``samples = False``: its closures return a scalar.
    """

    def pairs(self, k: int) -> PairSet:
        """The second-order terms that the pass carries for K directions."""
        ...

    def model(self, jet: Jet, pairs: PairSet) -> Quadratic:
        """The model in the plane, from the jet of the loss, () or (B,), along ``pairs``."""
        ...


def is_late(curvature: Curvature) -> bool:
    """Whether the curvature's second order begins at the loss, and not at the parameters."""
    return bool(getattr(curvature, "late", False))


@dataclass(frozen=True)
class NoCurvature:
    """First order only: slope V g, curvature zero.

    Example:
        >>> jet = Jet(torch.tensor(1.0), torch.tensor([2.0, 3.0]), None)
        >>> NoCurvature().model(jet, NoCurvature().pairs(2)).curvature
        tensor([[0., 0.],
                [0., 0.]])
    """

    late: ClassVar[bool] = CURVATURES["none"].late
    samples: ClassVar[bool] = False

    def pairs(self, k: int) -> PairSet:
        return CURVATURES["none"].pairs(k)

    def model(self, jet: Jet, pairs: PairSet) -> Quadratic:
        return CURVATURES["none"].read(jet, pairs)


@dataclass(frozen=True)
class ExactHessian:
    """The projected Hessian: slope V g, curvature V H V^T, exact.

    Example:
        >>> jet = Jet(torch.tensor(1.0), torch.tensor([2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0]))
        >>> ExactHessian().model(jet, ExactHessian().pairs(2)).curvature
        tensor([[4., 5.],
                [5., 6.]])
    """

    late: ClassVar[bool] = CURVATURES["exact"].late
    samples: ClassVar[bool] = False

    def pairs(self, k: int) -> PairSet:
        return CURVATURES["exact"].pairs(k)

    def model(self, jet: Jet, pairs: PairSet) -> Quadratic:
        return CURVATURES["exact"].read(jet, pairs)


@dataclass(frozen=True)
class GaussNewton:
    """The projected Gauss-Newton matrix V J^T (Hess loss) J V^T: the model's output is taken for linear in the plane.

    A layer costs 1 + 2K products of its own size. Positive semi-definite where the loss is convex in the model's
    output, and equal to the exact Hessian where the model is linear in its parameters. The output is the input of a
    loss of torch.nn.functional, or what :func:`jetplane.mark_output` is given. Terms of the loss in the parameters
    alone, as a penalty on their norm, are exact.

    Example:
        >>> import jetplane as jp
        >>> x = torch.tensor([1.0], requires_grad=True)
        >>> parts = jp.directions.Coordinate(), GaussNewton(), jp.solvers.JitteredInverse()
        >>> search = jp.optim.HyperplaneSearch([x], 0.0, *parts)
        >>> loss = search.step(lambda: torch.nn.functional.mse_loss(x.exp(), torch.zeros(1)))
        >>> torch.testing.assert_close(search.report.curvature, 2 * x.exp().detach().square()[None])
    """

    late: ClassVar[bool] = CURVATURES["ggn"].late

    def pairs(self, k: int) -> PairSet:
        return CURVATURES["ggn"].pairs(k)

    def model(self, jet: Jet, pairs: PairSet) -> Quadratic:
        return CURVATURES["ggn"].read(jet, pairs)


@dataclass(frozen=True)
class EmpiricalFisher:
    """The second moment (1/B) S S^T of the per-sample slopes S (K, B): positive semi-definite, at first-order cost.

    The closure returns the losses of the single samples (B,).

    Example:
        >>> jet = Jet(torch.ones(2), torch.tensor([[1.0, 3.0]]), None)
        >>> EmpiricalFisher().model(jet, EmpiricalFisher().pairs(1)).curvature
        tensor([[5.]])
    """

    late: ClassVar[bool] = CURVATURES["fisher"].late

    def pairs(self, k: int) -> PairSet:
        return CURVATURES["fisher"].pairs(k)

    def model(self, jet: Jet, pairs: PairSet) -> Quadratic:
        return CURVATURES["fisher"].read(jet, pairs)


_NAMES: dict[str, type[Curvature]] = {
    "exact": ExactHessian,
    "ggn": GaussNewton,
    "fisher": EmpiricalFisher,
    "none": NoCurvature,
}


def find(curvature: str | Curvature) -> Curvature:
    """The curvature of this name, "exact", "ggn", "fisher" or "none"; one that is a curvature already is returned.

    Example:
        >>> find("ggn")
        GaussNewton()
    """
    if isinstance(curvature, str):
        entry(curvature)  # says what is wrong with it
        return _NAMES[curvature]()
    if isinstance(curvature, type) or not isinstance(curvature, Curvature):
        what = curvature.__name__ if isinstance(curvature, type) else type(curvature).__name__
        raise TypeError(
            f"curvature is {what}; expected ExactHessian(), GaussNewton(), EmpiricalFisher(), NoCurvature() or the "
            f"name of one: {', '.join(map(repr, _NAMES))}."
        )
    return curvature
