"""The other estimator: tangents of the weights themselves, as FGD uses them. Unbiased, and far noisier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..ad.algebra.jet import Jet, PairSet
from ..ad.run.budget import chunk_size_of
from ..ad.run.directions import Directions
from ..ad.run.passes import chunks
from ..ad.run.perturb import perturb
from ..ad.run.replay import Replay
from ..directions import Gaussian, Plane
from ..parallel.shards import Meeting
from .passes.kept_plans import Width
from .plan.noise_plan import FEWEST
from .program.loss_program import LossProgram
from .program.parameters import Parameters

__all__ = ["weight_gradient"]


@dataclass(frozen=True)
class _Part:
    """Some of the rows of some directions."""

    directions: Directions
    start: int
    stop: int

    @property
    def k(self) -> int:
        return self.stop - self.start

    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        return self.directions.rows(position, like, self.start + start, self.start + stop)


@dataclass(frozen=True)
class _SlopesFound:
    """What the passes along all directions have found."""

    slopes: list[Tensor]  # (j, ...) of the sum of the losses, chunk by chunk
    losses: Tensor
    aux: object
    chunk: int  # directions that travelled together


def weight_gradient(
    parameters: Parameters,
    program: LossProgram,
    width: Width,
    seed: int,
    step: int | Tensor,
    allow_unused: bool,
    meeting: Meeting,
) -> tuple[Tensor, object]:
    """Add sum_j (v_j . g) v_j / J with Gaussian v_j to every ``.grad``; the losses, and what came with them.

    g is the gradient of the mean loss, v_j . g its slope: J tangents carried by forward passes, some at a time.
    """
    samples = width.samples or FEWEST  # there are no activations that could say how many
    leaves = [leaf.detach() for leaf in parameters.tensors]
    drawn = Gaussian(samples).draw(Plane(seed, step, 0, leaves, list))
    sharing = meeting.tangents
    mine = range(samples) if sharing is None else sharing.mine(samples)
    found = _slopes_along(drawn, mine, parameters, program, width, allow_unused)
    slopes = found.slopes if sharing is None else sharing.gathered([torch.cat(found.slopes)], samples)
    shard = meeting.shard(found.losses.shape[0], 0)
    total = found.losses.shape[0] if shard is None else shard.total
    of_mean = torch.cat([part / total for part in slopes])  # (J,)
    sums = meeting.sums(0.0, found.losses, lambda: [of_mean])
    weights = (torch.full_like(of_mean, torch.nan) if sums is None else sums[0]) / samples
    for position, leaf in enumerate(leaves):
        _accumulate(parameters, drawn, position, leaf, weights, found.chunk)
    return found.losses, found.aux


def _slopes_along(
    drawn: Directions, mine: range, parameters: Parameters, program: LossProgram, width: Width, allow_unused: bool
) -> _SlopesFound:
    """The slopes of the losses' sum along some rows of the directions."""
    devices = [leaf.device for leaf in parameters.tensors]
    named = dict(zip(parameters.names, parameters.tensors, strict=True))

    def run(rows: Sequence[int]) -> tuple[Jet, object]:
        part = _Part(drawn, rows[0], rows[-1] + 1)
        with perturb(named, part, pairs="none", allow_unused=allow_unused) as jets:
            losses, aux = program()
        return jets.of_result(losses), aux

    everything = PairSet.none(len(mine))
    size = chunk_size_of(width.memory, width.chunk_size, everything, lambda chunk: run(chunk.rows)[0], devices)
    replay, slopes = Replay(devices), []
    for chunk in chunks(everything, size):
        jet, aux = replay.run(partial(run, [mine.start + row for row in chunk.rows]))
        slopes.append(jet.tangent.flatten(1).sum(1))
    return _SlopesFound(slopes, jet.primal, aux, size or drawn.k)


def _accumulate(
    parameters: Parameters, drawn: Directions, position: int, leaf: Tensor, weights: Tensor, chunk: int
) -> None:
    """Add the sum of the directions (J, *S) of a parameter, times their weights (J,), so many at a time."""
    for start in range(0, weights.shape[0], chunk):
        some = weights[start : start + chunk]
        rows = drawn.rows(position, leaf, start, start + some.shape[0])
        parameters.add(position, torch.tensordot(some.to(rows), rows, dims=1))
