"""A model of the time and the bytes of one step for many workers: compute, stragglers, and what is exchanged.

    T = max over workers of compute + exchange

Nothing in it is measured but the constants it is given. An exchange of a plane is a gather of m bytes from everybody
and a broadcast of K coefficients, as gloo makes them: a ring of N - 1 rounds and a tree of log2 N.

    gather(N, m) = (N - 1) (latency + m / bandwidth)        ring; a tree: ceil(log2 N) latency + (N - 1) m / bandwidth
    all-reduce(N, G) = 2 (N - 1) latency + 2 (N - 1) / N G / bandwidth

The compute of a worker is its mean time with lognormal jitter, and now and then many times that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Link",
    "Straggling",
    "all_reduce_seconds",
    "computes",
    "fitted_bytes",
    "gather_seconds",
    "numbers_of",
    "plane_bytes",
    "plane_seconds",
    "ratio",
    "step",
    "store_seconds",
]

_NUMBER = 8  # bytes, in float64


@dataclass(frozen=True)
class Link:
    """What connects two workers."""

    latency: float  # seconds of one message
    bandwidth: float  # bytes a second


@dataclass(frozen=True)
class Straggling:
    """How the compute of one worker varies around its mean."""

    jitter: float = 0.05  # standard deviation of its logarithm
    share: float = 0.0  # of steps in which a worker is slow
    factor: float = 10.0  # how slow


def numbers_of(k: int, *, curved: bool = True, noise: bool = False) -> tuple[int, int]:
    """How many numbers a process says of a plane, and the first one answers.

    Example:
        >>> numbers_of(2), numbers_of(1, curved=False)
        ((9, 5), (5, 4))
    """
    pairs = k * (k + 1) // 2
    return 1 + 3 + k + pairs * curved + (1 + pairs) * noise, 1 + 2 + k


def fitted_bytes(cases: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """The bytes that a message between two workers and a visit to the store have beside their numbers.

    ``cases`` are (processes, numbers' bytes, measured bytes) of a step, and measured = bytes + N (N - 1) a + N b.

    Example:
        >>> fitted_bytes([(2, 0, 6.0), (4, 0, 28.0), (3, 0, 15.0)])
        (2.0, 1.0)
    """
    rows = torch.tensor([[n * (n - 1), n] for n, _, _ in cases], dtype=torch.float64)
    left = torch.tensor([seen - known for _, known, seen in cases], dtype=torch.float64)
    # relative to what was measured: the larger cases would decide alone
    sizes = torch.tensor([seen for *_, seen in cases], dtype=torch.float64)
    found = torch.linalg.lstsq(rows / sizes.unsqueeze(1), (left / sizes).unsqueeze(1)).solution
    message, visit = (round(float(one), 9) for one in found.flatten())
    return message, visit


def plane_bytes(processes: int, said: int, answered: int) -> int:
    """Of the numbers of one plane alone: everybody's go to everybody, and the first one's."""
    return _NUMBER * (processes * (processes - 1) * said + (processes - 1) * answered)


def gather_seconds(workers: int, size: float, link: Link, *, tree: bool = False) -> float:
    """For ``size`` bytes of each worker to be at all of them.

    Example:
        >>> gather_seconds(5, 0, Link(1.0, 1.0)), gather_seconds(5, 0, Link(1.0, 1.0), tree=True)
        (4.0, 3.0)
    """
    rounds = math.ceil(math.log2(workers)) if tree and workers > 1 else workers - 1
    return rounds * link.latency + (workers - 1) * size / link.bandwidth


def all_reduce_seconds(workers: int, size: float, link: Link) -> float:
    """For a sum of ``size`` bytes to be at all workers, by rings, or by a tree where that has less latency.

    Example:
        >>> all_reduce_seconds(2, 10.0, Link(0.0, 1.0))
        10.0
    """
    if workers == 1:
        return 0.0
    rounds = min(2 * (workers - 1), 2 * math.ceil(math.log2(workers)))
    return rounds * link.latency + 2 * (workers - 1) / workers * size / link.bandwidth


def plane_seconds(workers: int, k: int, link: Link, *, tree: bool = False) -> float:
    """The exchange of a plane."""
    if workers == 1:
        return 0.0
    said, answered = numbers_of(k)
    down = math.ceil(math.log2(workers)) * (link.latency + _NUMBER * answered / link.bandwidth)
    return gather_seconds(workers, _NUMBER * said, link, tree=tree) + down


def store_seconds(workers: int, link: Link) -> float:
    """The exchange of a quorum: the first process asks the store for each worker's numbers, and whether they are there.

    Example:
        >>> store_seconds(11, Link(1.0, 1.0))
        40.0
    """
    return 4 * (workers - 1) * link.latency


def computes(workers: int, mean: float, straggling: Straggling, draws: int, generator: torch.Generator) -> Tensor:
    """Seconds of each worker, (draws, workers), of this mean where nobody is slow."""
    logs = torch.randn(draws, workers, generator=generator, dtype=torch.float64) * straggling.jitter
    slow = torch.rand(draws, workers, generator=generator, dtype=torch.float64) < straggling.share
    times = (logs - straggling.jitter**2 / 2).exp() * mean
    return torch.where(slow, times * straggling.factor, times)


def step(times: Tensor, exchange: float, *, least: int | None = None, wait: float = 0.0) -> tuple[float, float]:
    """Mean seconds of a step, and the mean share of the workers in it, for computes (draws, workers).

    With a quorum a step goes on once all are there, or ``least`` are and ``wait`` seconds have passed since the first
    process, whose compute is the first column, was done.

    Example:
        >>> times = torch.tensor([[1.0, 1.0, 9.0]])
        >>> step(times, 0.5), step(times, 0.5, least=2, wait=1.0)
        ((9.5, 1.0), (2.5, 0.6666666666666666))
    """
    ends = times.amax(1)
    if least is not None:
        enough = times.sort(1).values[:, least - 1]
        ends = torch.minimum(ends, torch.maximum(torch.maximum(enough, times[:, 0] + wait), times[:, 0]))
    there = (times <= ends.unsqueeze(1)).double().mean(1)
    return float(ends.mean()) + exchange, float(there.mean())


def ratio(
    parameters: float,
    workers: int,
    link: Link,
    *,
    flops: float,
    tokens: float,
    k: int = 2,
    passes: float = 3.0,
    bytes_each: int = 2,
    overlap: bool = True,
) -> float:
    """How many steps in a plane take the time of one step of data-parallel backprop.

    A forward pass of a token is two operations a parameter, a gradient three such passes, a plane ``passes`` of them.
    Of an all-reduce the part that a backward pass can hide is hidden where there is ``overlap``.

    Example:
        >>> ratio(1e9, 1, Link(1e-5, 1e9), flops=1e14, tokens=1e4)
        1.0
    """
    forward = 2 * parameters * tokens / flops
    reduce = all_reduce_seconds(workers, bytes_each * parameters, link)
    hidden = min(reduce, 2 * forward) if overlap else 0.0
    gradient = 3 * forward + reduce - hidden
    return gradient / (passes * forward + plane_seconds(workers, k, link, tree=True))
