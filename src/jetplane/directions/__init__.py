"""Families of directions: each one chooses the K directions of an optimizer's step.

Random families are functions of (seed, step, sample, parameter, row, element) alone: see :mod:`.counter`.
"""

from .given import Coordinate, Fixed, Gradient
from .plane import Family, Plane
from .random import Gaussian, Orthonormal, Rademacher, Sphere

__all__ = [
    "Coordinate",
    "Family",
    "Fixed",
    "Gaussian",
    "Gradient",
    "Orthonormal",
    "Plane",
    "Rademacher",
    "Sphere",
]
