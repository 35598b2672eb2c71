"""Families of directions: each one chooses the K directions of an optimizer's step.

Random families are functions of (seed, step, sample, parameter, row, element) alone: see :mod:`.counter`. Families that
remember are functions of the steps that were taken: see :mod:`.memory`.
"""

from .given import Coordinate, Fixed, Gradient
from .grown import Grown
from .memory import Best, Momentum, PreviousStep
from .mixed import Mixed, PerLayer
from .plane import Family, Memory, Plane, Remembering, Resizable, Size, Taken
from .random import Gaussian, Orthonormal, Rademacher, Sphere
from .rank_one import RankOne

__all__ = [
    "Best",
    "Coordinate",
    "Family",
    "Fixed",
    "Gaussian",
    "Gradient",
    "Grown",
    "Memory",
    "Mixed",
    "Momentum",
    "Orthonormal",
    "PerLayer",
    "Plane",
    "PreviousStep",
    "Rademacher",
    "RankOne",
    "Remembering",
    "Resizable",
    "Size",
    "Sphere",
    "Taken",
]
