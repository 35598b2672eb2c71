"""Classical test functions as torch programs of a vector, with their known minima.

>>> beale = find("beale")
>>> float(beale.function(beale.minima(2)[0]))
0.0
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["FUNCTIONS", "TestFunction", "find"]


@dataclass(frozen=True)
class TestFunction:
    """A function of a vector (D,) with known global minima, and where runs on it start.

    ``points`` are the global minima of a function of fixed dimension, or single numbers that every coordinate takes.
    """

    __test__: ClassVar[bool] = False  # not a test, whatever its name suggests to a collector

    name: str
    function: Callable[[Tensor], Tensor]  # (D,) -> ()
    dimension: int | None  # None: any number of at least `least`
    box: tuple[float, float]  # of every coordinate; starts are drawn from it
    points: tuple[tuple[float, ...], ...]
    least: int = 1
    per_coordinate: float = 0.0  # the minimum value is this times D
    smooth: bool = True  # at the minima
    normal: bool = False  # starts are standard normal, not uniform in the box

    def dim(self, wanted: int) -> int:
        """The dimension nearest to the wanted one that the function has."""
        return self.dimension if self.dimension is not None else max(wanted, self.least)

    def minima(self, dim: int) -> Tensor:
        """All global minima (M, D), in float64."""
        points = torch.tensor(self.points, dtype=torch.float64)
        return points if self.dimension is not None else points.expand(-1, dim).clone()

    def minimum(self, dim: int) -> float:
        """The least value."""
        return self.per_coordinate * dim

    def start(self, dim: int, seed: int) -> Tensor:
        """A start (D,) in float64, a function of the seed alone."""
        generator = torch.Generator().manual_seed(seed)
        if self.normal:  # drawn in float32: these are the starts of the published script
            return torch.randn(dim, generator=generator, device="cpu").double()
        low, high = self.box
        return low + (high - low) * torch.rand(dim, dtype=torch.float64, generator=generator, device="cpu")


def _rosenbrock(x: Tensor) -> Tensor:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def _beale(x: Tensor) -> Tensor:
    a, b = x[0], x[1]
    return (1.5 - a + a * b) ** 2 + (2.25 - a + a * b**2) ** 2 + (2.625 - a + a * b**3) ** 2


def _himmelblau(x: Tensor) -> Tensor:
    return (x[0] ** 2 + x[1] - 11) ** 2 + (x[0] + x[1] ** 2 - 7) ** 2


def _ackley(x: Tensor) -> Tensor:
    ripple = (2 * math.pi * x).cos().mean().exp()
    return 20 + math.e - 20 * (-0.2 * (x**2).mean().sqrt()).exp() - ripple


def _rastrigin(x: Tensor) -> Tensor:
    return (10 + x**2 - 10 * (2 * math.pi * x).cos()).sum()


def _styblinski_tang(x: Tensor) -> Tensor:
    return (x**4 - 16 * x**2 + 5 * x).sum() / 2


def _booth(x: Tensor) -> Tensor:
    return (x[0] + 2 * x[1] - 7) ** 2 + (2 * x[0] + x[1] - 5) ** 2


def _levy(x: Tensor) -> Tensor:
    w = 1 + (x - 1) / 4
    first = (math.pi * w[0]).sin() ** 2
    middle = ((w[:-1] - 1) ** 2 * (1 + 10 * (math.pi * w[:-1] + 1).sin() ** 2)).sum()
    return first + middle + (w[-1] - 1) ** 2 * (1 + (2 * math.pi * w[-1]).sin() ** 2)


_HIMMELBLAU = (
    (3.0, 2.0),
    (-2.8051180869527448, 3.1313125182505730),
    (-3.7793102533777469, -3.2831859912861694),
    (3.5844283403304917, -1.8481265269644036),
)

FUNCTIONS = {
    entry.name: entry
    for entry in (
        TestFunction("rosenbrock", _rosenbrock, None, (-2.048, 2.048), ((1.0,),), least=2, normal=True),
        TestFunction("beale", _beale, 2, (-4.5, 4.5), ((3.0, 0.5),)),
        TestFunction("himmelblau", _himmelblau, 2, (-5.0, 5.0), _HIMMELBLAU),
        TestFunction("ackley", _ackley, None, (-5.0, 5.0), ((0.0,),), smooth=False),
        TestFunction("rastrigin", _rastrigin, None, (-5.12, 5.12), ((0.0,),)),
        TestFunction(
            *("styblinski-tang", _styblinski_tang, None, (-5.0, 5.0), ((-2.9035340277711770,),)),
            per_coordinate=-39.166165703771419,
        ),
        TestFunction("booth", _booth, 2, (-10.0, 10.0), ((1.0, 3.0),)),
        TestFunction("levy", _levy, None, (-10.0, 10.0), ((1.0,),)),
    )
}


def find(name: str) -> TestFunction:
    """The function of this name."""
    if name not in FUNCTIONS:
        raise ValueError(f"there is no test function {name!r}; the known ones are {', '.join(FUNCTIONS)}.")
    return FUNCTIONS[name]
