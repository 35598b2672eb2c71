"""Families of directions: each one chooses the K directions of an optimizer's step.

Random families are functions of (seed, step, sample, parameter, row, element) alone: see :mod:`.counter`. Families that
remember are functions of the steps that were taken: see :mod:`.remembered`.
"""

from .earlier import Remembering, Resizable
from .given import Coordinate, Fixed, Gradient
from .grown import Grown
from .mixed import Mixed, PerLayer
from .plane import Family, Learning, Learnt, Memory, Plane, Size, Start, Taken
from .random import Gaussian, Orthonormal, Rademacher, Sphere
from .rank_one import RankOne
from .remembered import Best, Momentum, PreviousStep

__all__ = [
    "Best",
    "Coordinate",
    "Family",
    "Fixed",
    "Gaussian",
    "Gradient",
    "Grown",
    "Learning",
    "Learnt",
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
    "Start",
    "Taken",
]
