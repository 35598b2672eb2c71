"""What a step knows of the curvature in its plane: nothing, all of it, or the part that makes it positive.

A curvature says which second-order terms the pass carries and where they begin, and reads the quadratic model from the
jet of the loss: a single number, or one loss for each sample, whose mean it is.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from .ad.jet import Jet, PairSet, Quadratic

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

    late: ClassVar[bool] = False

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

    late: ClassVar[bool] = False

    def pairs(self, k: int) -> PairSet:
        return PairSet.all(k)

    def model(self, jet: Jet, pairs: PairSet) -> Quadratic:
        return _read(jet, pairs)


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

    late: ClassVar[bool] = True

    def pairs(self, k: int) -> PairSet:
        return PairSet.all(k)

    def model(self, jet: Jet, pairs: PairSet) -> Quadratic:
        return _read(jet, pairs)


@dataclass(frozen=True)
class EmpiricalFisher:
    """The second moment (1/B) S S^T of the per-sample slopes S (K, B): positive semi-definite, at first-order cost.

    The closure returns the losses of the single samples (B,).

    Example:
        >>> jet = Jet(torch.ones(2), torch.tensor([[1.0, 3.0]]), None)
        >>> EmpiricalFisher().model(jet, EmpiricalFisher().pairs(1)).curvature
        tensor([[5.]])
    """

    late: ClassVar[bool] = False

    def pairs(self, k: int) -> PairSet:
        return PairSet.none(k)

    def model(self, jet: Jet, pairs: PairSet) -> Quadratic:
        if jet.primal.ndim != 1:
            raise ValueError(
                f"the loss has shape {tuple(jet.primal.shape)}; the empirical Fisher is made of the slopes of single "
                "samples, expected one loss for each of them (B,), as with reduction='none'."
            )
        plain = _read(jet, pairs)
        slopes = jet.tangent
        return Quadratic(plain.loss, plain.slope, slopes @ slopes.T / slopes.shape[1], plain.noise)


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
        if curvature in _NAMES:
            return _NAMES[curvature]()
        close = difflib.get_close_matches(curvature.lower(), _NAMES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"curvature is {curvature!r}; expected one of {', '.join(map(repr, _NAMES))}.{hint}")
    if isinstance(curvature, type) or not isinstance(curvature, Curvature):
        what = curvature.__name__ if isinstance(curvature, type) else type(curvature).__name__
        raise TypeError(
            f"curvature is {what}; expected ExactHessian(), GaussNewton(), EmpiricalFisher(), NoCurvature() or the "
            f"name of one: {', '.join(map(repr, _NAMES))}."
        )
    return curvature


def _read(jet: Jet, pairs: PairSet) -> Quadratic:
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
