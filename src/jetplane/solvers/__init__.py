"""Solvers: each one finds the step in a plane from the quadratic model there.

All but `JitteredInverse` descend: ``coefficients @ slope < 0`` for every finite, non-zero slope.
"""

from .adopted import Adaptive, Traceable, TraceableAdaptive, adaptive
from .base import Following, Solver, Status, Step
from .cubic import Cubic
from .damped import Damped
from .inverse import JitteredInverse
from .line import AbsoluteCurvature, NegativeSlope
from .marquardt import LevenbergMarquardt
from .names import find
from .spectral import SaddleFree, SoftAbs
from .traced import TracedStep
from .trust import TrustRegion

__all__ = [
    "AbsoluteCurvature",
    "Adaptive",
    "Cubic",
    "Damped",
    "Following",
    "JitteredInverse",
    "LevenbergMarquardt",
    "NegativeSlope",
    "SaddleFree",
    "SoftAbs",
    "Solver",
    "Status",
    "Step",
    "Traceable",
    "TraceableAdaptive",
    "TracedStep",
    "TrustRegion",
    "adaptive",
    "find",
]
