"""Means over seeds, and the difference of two means with its interval; Student's t without scipy.

The paper prints a mean and a standard deviation over a few seeds, in four decimals. A difference of ours from it is
judged by Welch's interval, which does not suppose equal spread. Where one side has a single run its spread is unknown:
that of the other side is taken for both, and the interval is then a prediction interval for one further run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["ROUNDING", "Difference", "Sample", "difference", "sample", "t_cdf", "t_quantile"]

ROUNDING = 5e-5  # half a unit of the last of four printed decimals: what a printed 0.0000 may hide


class Sample(NamedTuple):
    """Mean and sample standard deviation (nan for one value) of n values."""

    mean: float
    std: float
    n: int


class Difference(NamedTuple):
    """A difference of means, its 95% interval (nan where it cannot be had), and how many of their std it is."""

    value: float
    low: float
    high: float
    stds: float  # of the second sample


def sample(values: Sequence[float]) -> Sample:
    """Mean and sample standard deviation; nan where a value is, or where there is none.

    >>> sample([1.0, 2.0, 3.0])
    Sample(mean=2.0, std=1.0, n=3)
    """
    if not values or any(map(math.isnan, values)):
        return Sample(math.nan, math.nan, len(values))
    return Sample(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan, len(values))


def difference(ours: Sample, theirs: Sample, level: float = 0.95) -> Difference:
    """Ours minus theirs, with Welch's interval.

    >>> d = difference(Sample(0.30, 0.01, 5), Sample(0.31, 0.01, 5))
    >>> round(d.value, 4), round(d.low, 4), round(d.high, 4), round(d.stds, 4)
    (-0.01, -0.0246, 0.0046, -1.0)
    """
    value = ours.mean - theirs.mean
    spread = theirs.std if math.isnan(theirs.std) else max(theirs.std, ROUNDING)
    a, b = (ours.std if ours.n > 1 else spread), (spread if theirs.n > 1 else ours.std)
    u, v = a * a / ours.n if ours.n else math.nan, b * b / theirs.n if theirs.n else math.nan
    variance = u + v
    if math.isnan(variance) or variance == 0:
        return Difference(value, math.nan, math.nan, value / spread if spread else math.nan)
    if min(ours.n, theirs.n) > 1:
        freedom = variance**2 / (u**2 / (ours.n - 1) + v**2 / (theirs.n - 1))
    else:
        freedom = max(ours.n, theirs.n) - 1
    half = t_quantile(0.5 + level / 2, freedom) * math.sqrt(variance)
    return Difference(value, value - half, value + half, value / spread if spread else math.nan)


def t_quantile(p: float, freedom: float) -> float:
    """The quantile of Student's t with any positive (not only whole) number of degrees of freedom.

    >>> round(t_quantile(0.975, 4), 4), round(t_quantile(0.975, 1e6), 4)
    (2.7764, 1.96)
    """
    if not 0 < p < 1:
        raise ValueError(f"p is {p:g}; a quantile needs a probability between 0 and 1.")
    if p < 0.5:
        return -t_quantile(1 - p, freedom)
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < p:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def t_cdf(t: float, freedom: float) -> float:
    """P(T <= t): 1 - I_x(n/2, 1/2) / 2 for t >= 0, with x = n / (n + t^2)."""
    tail = _beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2
    return 1 - tail if t >= 0 else tail


def _beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b)."""
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1 - _beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    return front * _fraction(x, a, b) / a


def _fraction(x: float, a: float, b: float) -> float:
    """Its continued fraction, by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    value = d
    for m in range(1, 500):
        for top in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / ((1 + top * d) or tiny)
            c = (1 + top / c) or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value
