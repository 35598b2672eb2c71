"""How long the noise of each site is, so that well predicted sites are not disturbed by those that are not.

All sites' noise meets in one scalar. Noise of length c_l adds c_l^2 R_l to its variance, where R_l is the part
|g - A^T e|^2 of the site's derivative g that is not predicted; and the site reads its own derivative off as s u / c_l,
with 1 / c_l^2 of the variance of the whole. What counts is that variance beside the derivative itself, D_l = R_l +
|A^T e|^2 of a sample: Adam takes a step of the same length whatever the derivative's units. The sum of these over the
sites is least for c_l^2 ~ 1 / sqrt(D_l R_l).

R_l is a noisy number. A site that seems to have next to none by chance would get noise without measure, and disturb all
others, so R_l counts as no less than its standard deviation. And it may pass zero: there 1 / R_l would make large
differences of small ones, in all noise and so in every later R_l, and rounding errors would grow from step to step. So
it counts as no less than a hundredth of all, either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan.noise_plan import Site

__all__ = ["doubt", "lengths", "sizes", "unpredicted"]

_LEAST = 1e-2  # of all that is not predicted, for a site: less cannot be told from nothing
_SHORTEST = 0.01  # noise of a token, in units of its site's


def lengths(unexplained: Tensor, explained: Tensor, doubt: Tensor) -> Tensor:
    """c of each site from its R, its |A^T e|^2, and how far R may be off in units of the sum of all, each (sites,).

    1 in the geometric mean, and everywhere while nothing is known.

    Example:
        >>> certain = torch.zeros(2)
        >>> lengths(torch.tensor([4.0, 1.0]), torch.zeros(2), certain)
        tensor([0.7071, 1.4142])
        >>> lengths(torch.tensor([16.0, 1.0]), torch.tensor([0.0, 255.0]), certain)
        tensor([1., 1.])
        >>> lengths(torch.tensor([1.0, 0.0]), torch.zeros(2), torch.tensor([0.25, 0.25]))
        tensor([0.7071, 1.4142])
        >>> lengths(torch.zeros(2), torch.ones(2), torch.tensor([2.0, 9.0]))
        tensor([1., 1.])
        >>> lengths(torch.tensor([-8e-3, 3e-5]), torch.zeros(2), certain)
        tensor([1., 1.])
    """
    # below zero is chance, which goes as far above: where nothing stands out of it, nothing is known
    chance = -(unexplained.min() + unexplained.max())
    parts = torch.maximum(unexplained, chance.clamp_min(0)).clamp_min(0)
    total = parts.sum()
    left = torch.maximum(torch.where(total > 0, parts / total, 1.0), doubt.clamp(_LEAST, 1.0))
    whole = left + torch.where(total > 0, explained / total, 0.0)
    logs = (whole.log() + left.log()) / -4
    return (logs - logs.mean()).exp()


def doubt(numbers: Tensor, tangents: int, samples: int, averaged: Tensor) -> Tensor:
    """The standard deviation of each site's R (sites,), in units of the sum of all: of the mean of so many calls.

    In one call R is the mean over the samples, each with ``numbers`` (sites,) of noise, of all pairs of its tangents'
    s_j s_k u_j . u_k, and the variance of s is that sum.
    """
    pairs = max(tangents * (tangents - 1), 1)
    return (2 * numbers / (pairs * samples * averaged)).sqrt()


def sizes(site: Site, activation: Tensor) -> Tensor | None:
    """How long the noise of each token is, beside the others' of its site; None for the same everywhere.

    In front of a norm a token's derivative goes with the inverse of its own length, so noise in proportion to it does
    as much in all of them: else a few short tokens, empty patches of an image or a class token that starts at zero,
    would make most of what the scalars hold.
    """
    if not site.normed:
        return None
    wide = activation.to(torch.promote_types(activation.dtype, torch.float32))
    square = wide.square().mean(-1, keepdim=True)
    return (square / square.mean()).nan_to_num(nan=1.0).clamp_min(_SHORTEST**2).sqrt().to(activation.dtype)


def unpredicted(found: Tensor, numbers: Tensor, active: Tensor) -> Tensor:
    """c^2 R of a site, (), without bias, from ``found`` = sum_j s_j u_j, where the multipliers s are ``numbers``
    (J, B, C) of its samples and tokens, over J B, and the numbers of entries (B, C) that the noise has in each.

    |found|^2 less the terms of one and the same tangent: for two different ones the noise of the other sites, which is
    far larger than R, is zero in the mean.
    """
    tangents, samples, _ = numbers.shape
    alone = (numbers.square().sum(0) * active.to(numbers)).sum()
    return (found.square().sum() - alone) * (tangents * samples / (tangents - 1))
