"""The paper's methods and their baselines, put together from the parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypedDict, Unpack

from torch import Tensor

from ..ad.run.parts import is_shared_out
from ..curvature import Curvature, ExactHessian, GaussNewton, NoCurvature
from ..directions import Coordinate, Family, Gaussian, Gradient, Mixed, Momentum, RankOne
from ..directions.mixed import layers_of
from ..solvers import AbsoluteCurvature, JitteredInverse, LevenbergMarquardt, NegativeSlope, Solver
from .acceptance import UNRAISED, Choice
from .moving import Moving, listed
from .search import HyperplaneSearch

__all__ = ["FGD", "FoMoH", "FoMoHBP", "FoMoHKD", "GaussNewtonSearch", "Newton", "Options"]

_ABSOLUTE, _INVERSE = AbsoluteCurvature(), JitteredInverse()
_HESSIAN = ExactHessian()

_HORIZONS = (0.0, 0.9, 0.99, 0.997)  # of the steps that a search remembers; 0 is the last one
_DAMPING = 0.1


class Options(TypedDict, total=False):
    """What all optimizers take; :class:`HyperplaneSearch` says what each is."""

    seed: int
    samples: int
    weight_decay: float
    clip: float | None
    maximize: bool
    accept: Choice
    patience: int | None
    chunk_size: int | None
    memory: int | str | None
    compile: bool
    process_group: Any
    check_every: int | None


class FGD(HyperplaneSearch):
    """Forward gradient descent: theta -= lr * mean_k (v_k . grad f) v_k with Gaussian v_k.

    The mean over directions is an unbiased estimate of the gradient, for any K.

    Example:
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> opt = FGD([x], lr=0.1)
        >>> losses = [float(opt.step(lambda: x.square().sum())) for _ in range(100)]
        >>> assert losses[-1] < 1e-3 * losses[0]
    """

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1e-3, k: int = 1, **options: Unpack[Options]
    ) -> None:
        directions = Gaussian(k)  # checks k
        super().__init__(params, lr, directions, NoCurvature(), NegativeSlope(1 / k), **options)


class FoMoH(HyperplaneSearch):
    """Forward-mode second-order line search: theta -= lr * (v . grad f) / (|v^T H v| + eps) v with a Gaussian v.

    Example:
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> opt = FoMoH([x])
        >>> losses = [float(opt.step(lambda: x.square().sum())) for _ in range(100)]
        >>> assert losses[-1] < 1e-6 * losses[0]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1.0,
        *,
        solver: Solver = _ABSOLUTE,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, lr, Gaussian(1), ExactHessian(), solver, **options)


class FoMoHBP(HyperplaneSearch):
    """FoMoH along the gradient: theta -= lr * (g . g) / (|g^T H g| + eps) g, with one backward pass for g.

    Example:
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> loss = FoMoHBP([x]).step(lambda: x.square().sum())
        >>> assert float(x.detach().norm()) < 1e-5
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1.0,
        *,
        solver: Solver = _ABSOLUTE,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, lr, Gradient(), ExactHessian(), solver, **options)


class FoMoHKD(HyperplaneSearch):
    """Newton's step in the subspace of K Gaussian directions: theta -= lr * V^T (V H V^T)^-1 V grad f.

    The paper's solver goes to the stationary point of the plane, which is a maximum or a saddle where the projected
    Hessian is not positive definite; the step of ``solver=SaddleFree()`` (or LevenbergMarquardt) goes downhill always,
    and with TrustRegion, Cubic or Damped the loss does not rise either, for a step that would raise it is not taken.
    ``directions`` other than K Gaussian ones are a family, or a list such as [PreviousStep(), Gaussian(2)], and
    ``curvature`` another part, or its name.

    Example:
        >>> x = torch.tensor([3.0, 4.0], dtype=torch.float64, requires_grad=True)
        >>> loss = FoMoHKD([x], k=2).step(lambda: (x[0] - x[1]) ** 2 + x.square().sum())
        >>> assert float(x.detach().norm()) < 1e-12
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1.0,
        k: int | None = None,
        *,
        directions: Family | Sequence[Family] | None = None,
        curvature: Curvature | str = _HESSIAN,
        solver: Solver = _INVERSE,
        **options: Unpack[Options],
    ) -> None:
        if directions is None:
            directions = Gaussian(2 if k is None else k)
        elif k is not None:
            raise TypeError(f"k is {k} and there are directions, too; expected one of them.")
        super().__init__(params, lr, directions, curvature, solver, **options)


class GaussNewtonSearch(HyperplaneSearch):
    """Damped Gauss-Newton steps in a subspace: averages of past steps over several horizons, and rank-one directions.

    There is nothing to tune: damping follows how well the model predicts, and a step that would raise the loss of its
    batch is not taken. Only a part of the way to the plane's minimum is gone (``LevenbergMarquardt.relaxation``): 0.15
    from 32 directions on, more with fewer, and all of it where they span the space. ``lr`` is a factor on top, for
    schedulers. ``k`` is 64 by default; where the parameters have few entries a quarter of them, but at least 32 or all.
    Up to four directions, and not more than half, remember. The others are :class:`jetplane.directions.RankOne`, which
    cost little, or Gaussian ones where there are few for each layer or nearly as many as entries.

    Example:
        >>> model, x = torch.nn.Linear(3, 2), torch.randn(8, 3)
        >>> y = x[:, 0].sign().add(1).div(2).long()
        >>> opt = GaussNewtonSearch(model.parameters(), k=4)
        >>> loss_fn = lambda x, y: torch.nn.functional.cross_entropy(model(x), y, reduction="none")
        >>> losses = [float(opt.step(loss_fn, x, y)) for _ in range(20)]
        >>> assert losses[-1] < 0.5 * losses[0]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1.0,
        k: int | None = None,
        *,
        solver: Solver | None = None,
        **options: Unpack[Options],
    ) -> None:
        groups = [_lasting(one) for one in listed(params)]
        leaves = [leaf for one in groups for leaf in _leaves(one)]
        entries = sum(leaf.numel() for leaf in leaves)
        if k is None:
            k = max(1, min(64, max(32, entries // 4), entries))
        directions: Family = Gaussian(k)  # checks k
        if any(map(is_shared_out, leaves)):  # nothing is remembered of parameters that processes share out
            directions = _fresh(k, leaves, entries)
        elif horizons := _HORIZONS[: k // 2]:
            directions = Mixed([Momentum(horizons), _fresh(k - len(horizons), leaves, entries)])
        if solver is None:
            solver = LevenbergMarquardt(_DAMPING, _DAMPING, shrink=False, relaxation=_relaxation(k, entries))
        options.setdefault("accept", UNRAISED)
        super().__init__(groups, lr, directions, GaussNewton(), solver, **options)


def _fresh(k: int, leaves: list[Tensor], entries: int) -> Family:
    """K random directions: of rank one where that is cheaper than what it leaves out."""
    if not any(leaf.ndim > 1 for leaf in leaves):
        return Gaussian(k)
    return RankOne(k) if 4 * (max(layers_of(leaves)) + 1) <= k <= entries / 4 else Gaussian(k)


def _relaxation(k: int, entries: int) -> float:
    """How much of the way to the minimum of a plane is gone, where there are many more planes to come.

    A plane of few directions leaves little that a greedy step could spoil, and one that is the whole space nothing.
    """
    return 1.0 if k >= entries else max(0.15, min(1.0, 5 / k))


def _lasting(one: Any) -> Any:
    """A parameter, or a group whose parameters can be looked at more than once."""
    if isinstance(one, dict) and isinstance(one.get("params"), Iterator):
        return {**one, "params": list(one["params"])}
    return one


def _leaves(one: Any) -> list[Tensor]:
    """What moves of a parameter, of one with its name, or of a group."""
    if isinstance(one, dict):
        params = one.get("params", ())
        return [leaf for part in ([params] if isinstance(params, Tensor) else params) for leaf in _leaves(part)]
    leaf = one[-1] if isinstance(one, tuple) and one else one
    return [leaf] if isinstance(leaf, Tensor) and leaf.requires_grad else []


class Newton(HyperplaneSearch):
    """Newton's method: theta -= lr * H^-1 grad f, from forward passes with K = D. For small D only.

    More than ``max_dim`` entries are refused, for the full Hessian is computed.

    Example:
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> loss = Newton([x]).step(lambda: (x - 1).square().sum())
        >>> x.detach()
        tensor([1., 1.])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1.0,
        *,
        solver: Solver = _INVERSE,
        max_dim: int = 2000,
        **options: Unpack[Options],
    ) -> None:
        self.max_dim = max_dim
        super().__init__(params, lr, Coordinate(), ExactHessian(), solver, **options)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_dim": self.max_dim}

    def _check(self, moving: Moving) -> None:
        super()._check(moving)
        size = moving.entries
        if size > self.max_dim:
            raise ValueError(
                f"the parameters have {size} entries, and Newton computes their whole Hessian; expected at most "
                f"{self.max_dim}, a larger max_dim, or FoMoHKD."
            )
