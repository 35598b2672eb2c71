"""The reference numbers of a problem, and how far a result is from them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from jetplane.testing.oracle import double_backward

from .problem import Derivatives, Problem

__all__ = ["plain", "reference", "relative_error"]


def reference(problem: Problem) -> Derivatives:
    """The plane by double backward, at the problem's own precision."""
    found = double_backward(problem.loss, list(problem.params.values()), list(problem.directions.values()))
    return Derivatives(found.loss, found.slope, found.curvature)


def relative_error(actual: Derivatives, expected: Derivatives) -> float:
    """The largest error of loss, slope and curvature, each relative to its largest entry; infinite if not finite.

    Example:
        >>> one = Derivatives(torch.tensor(2.0), torch.tensor([1.0]), torch.tensor([[4.0]]))
        >>> relative_error(one._replace(curvature=torch.tensor([[5.0]])), one)
        0.25
    """
    worst = 0.0
    for name, a, b in zip(Derivatives._fields, actual, expected, strict=True):
        if a.shape != b.shape:
            raise ValueError(f"the {name} has shape {tuple(a.shape)}; expected {tuple(b.shape)}.")
        a, b = (t.detach().to("cpu", torch.float64) for t in (a, b))
        scale = float(b.abs().max()) or 1.0
        error = float((a - b).abs().max()) / scale
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def plain(plane: Derivatives) -> dict[str, Any]:
    """A plane as lists for JSON, exact in float64."""
    return {name: part.detach().double().tolist() for name, part in zip(Derivatives._fields, plane, strict=True)}


def of_plain(numbers: dict[str, Any]) -> Derivatives:
    """A plane from such lists."""
    loss, slope, curvature = (torch.tensor(numbers[name], dtype=torch.float64) for name in Derivatives._fields)
    return Derivatives(loss, slope, curvature)


def finite(plane: Derivatives) -> bool:
    """Whether all numbers are finite."""
    parts: list[Tensor] = list(plane)
    return all(bool(part.isfinite().all()) for part in parts)
