"""Solvers by name."""

from __future__ import annotations

from collections.abc import Callable

from .base import Solver
from .cubic import Cubic
from .damped import Damped
from .inverse import JitteredInverse
from .line import AbsoluteCurvature, NegativeSlope
from .marquardt import LevenbergMarquardt
from .spectral import SaddleFree, SoftAbs
from .trust import TrustRegion

__all__ = ["NAMES", "find"]

NAMES: dict[str, Callable[[], Solver]] = {
    "negative-slope": NegativeSlope,
    "absolute-curvature": AbsoluteCurvature,
    "jittered-inverse": JitteredInverse,
    "saddle-free": SaddleFree,
    "soft-abs": SoftAbs,
    "damped": Damped,
    "trust-region": TrustRegion,
    "cubic": Cubic,
    "levenberg-marquardt": LevenbergMarquardt,
}


def find(solver: str | Solver) -> Solver:
    """The solver of this name, with its defaults; one that is a solver already is returned.

    Example:
        >>> find("trust-region")
        TrustRegion(radius=1.0, largest=1000000.0)
        >>> find(Cubic(2.0))
        Cubic(sigma=2.0, smallest=1e-12)
    """
    if not isinstance(solver, str):
        return solver
    make = NAMES.get(solver.lower().replace("_", "-"))
    if make is None:
        raise ValueError(f"solver is {solver!r}; expected a solver or one of {', '.join(map(repr, NAMES))}.")
    return make()
