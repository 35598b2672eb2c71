"""How time and memory grow with K, batch and depth: laws fitted to the rows of a run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["AXES", "SHARED", "fit", "laws", "series"]

Row = dict[str, Any]

AXES = {"k": 2, "batch": 1, "depth": 1}  # and the degree of the polynomial
QUANTITIES = ("median_ms", "peak_mib")
SHARED = ("what", "model", "depth", "k", "batch", "precision")  # by the rows of a series, all but the axis
_SAME = (*SHARED, "system")
_LEAST = 3  # points of a law


def series(rows: Sequence[Row], axis: str, quantity: str) -> dict[tuple[Any, ...], list[tuple[int, float]]]:
    """The points (x, y) of all rows that differ in one axis alone, by the fields that they share."""
    found: defaultdict[tuple[Any, ...], list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        if row["status"] == "ok" and row.get(quantity) is not None:
            found[tuple(row[name] for name in _SAME if name != axis)].append((row[axis], row[quantity]))
    return {shared: sorted(points) for shared, points in found.items() if len(points) >= _LEAST}


def fit(points: Sequence[tuple[int, float]], degree: int) -> dict[str, Any]:
    """A power law a x^p, and a polynomial where there are more points than coefficients, both by relative error.

    ``worst`` is the largest relative difference of the polynomial from a point.

    Example:
        >>> law = fit([(1, 6.0), (2, 11.0), (3, 18.0), (4, 27.0)], degree=2)
        >>> [round(c, 6) for c in law["polynomial"]["coefficients"]]
        [3.0, 2.0, 1.0]
    """
    x = torch.tensor([p[0] for p in points], dtype=torch.float64)
    y = torch.tensor([p[1] for p in points], dtype=torch.float64)
    law: dict[str, Any] = {"points": [list(point) for point in points]}
    if bool((y > 0).all()):
        logs = torch.stack([torch.ones_like(x), x.log()], 1)
        intercept, exponent = torch.linalg.lstsq(logs, y.log()).solution.tolist()
        rest = y.log() - logs @ torch.tensor([intercept, exponent], dtype=torch.float64)
        total = float((y.log() - y.log().mean()).square().sum())
        r2 = 1 - float(rest.square().sum()) / total if total else 1.0
        law["power"] = {"factor": math.exp(intercept), "exponent": exponent, "r2": r2}
        if len(points) > degree + 1:
            powers = torch.stack([x**n for n in range(degree + 1)], 1)
            coefficients = torch.linalg.lstsq(powers / y[:, None], torch.ones_like(y)).solution
            worst = float(((powers @ coefficients - y) / y).abs().max())
            law["polynomial"] = {"coefficients": coefficients.tolist(), "worst": worst}
    return law


def laws(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The laws of all series of a run that have enough points."""
    found = []
    for axis, degree in AXES.items():
        names = [name for name in _SAME if name != axis]
        for quantity in QUANTITIES:
            for shared, points in series(rows, axis, quantity).items():
                what = dict(zip(names, shared, strict=True))
                found.append({**what, "axis": axis, "quantity": quantity, **fit(points, degree)})
    return found
