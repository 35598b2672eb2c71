"""Samples drawn by the slope of their losses: tangents go where there is something to find.

Most of a forward gradient's noise is multiplied by a sample's own derivative. Where a network has learned most of a
batch, few samples have nearly all of that, and the others' tangents are spent on next to nothing. So a batch of B is
drawn again from itself: sample b is expected q_b times, with the weight 1 / q_b each time, which leaves the mean as it
is. With q ~ |e|, the derivative of the losses by what enters them, the variance is (mean |e|)^2 in place of mean |e|^2.
It takes one more pass of values, and no more tangents.

The points (i + u) / B of one uniform number u choose the samples, so one with q_b = 2.3 is there twice or three times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...ad import _torch
from ..noise.readout import Readout
from ..noise.signs import Noise
from ..plan.noise_plan import NoisePlan
from ..program.loss_program import LossProgram
from .program_passes import Passes
from .sample_parts import alike

__all__ = ["chances", "drawn_again", "places_of", "resampled"]

_FLOOR = 0.1  # of all chances, shared out evenly: bounds the weight of a sample that is not what its slope says
_BITS = 32  # of the number that chooses


def chances(slopes: Tensor) -> Tensor:
    """q (B,) in float64, 1 in the mean, from the losses' derivatives by what enters them (B, ...).

    Example:
        >>> chances(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([1.9000, 0.1000], dtype=torch.float64)
        >>> chances(torch.zeros(2, 1))
        tensor([1., 1.], dtype=torch.float64)
    """
    sizes = slopes.flatten(1).to(torch.float64).square().sum(1).sqrt()
    mean = sizes.mean()
    return torch.where(mean == 0, 1.0, sizes / torch.where(mean == 0, 1.0, mean)) * (1 - _FLOOR) + _FLOOR


def drawn_again(chance: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Which samples take the places of a batch (B,), and their weights, for a number from 0 to 1.

    Example:
        >>> drawn_again(torch.tensor([0.5, 2.5, 0.5, 0.5]), torch.tensor(0.25))
        (tensor([0, 1, 1, 2]), tensor([2.0000, 0.4000, 0.4000, 2.0000]))
    """
    ends = chance.cumsum(0)
    ends = ends * (len(chance) / ends[-1])
    points = torch.arange(len(chance), dtype=ends.dtype, device=ends.device) + uniform.to(ends)
    chosen = torch.searchsorted(ends, points, right=True).clamp(max=len(chance) - 1)
    return chosen, 1 / chance[chosen]


def places_of(plan: NoisePlan, passes: Passes) -> tuple[int, ...]:
    """The tensors of a batch with an entry for each sample, by their places, where it can be drawn again; else none.

    Losses must be those of samples, whatever else is in the batch: some samples, twice and in another order, must have
    the losses that they have in the whole. A program that draws random numbers, or writes, is taken as it is.
    """
    if plan.samples == 1 or plan.random or plan.tail is None or not plan.sites or not plan.apart:
        return ()
    leaves = _torch.pytree.tree_leaves(list(passes.program.batch))
    places = tuple(place for place, leaf in enumerate(leaves) if _is_of_samples(leaf, plan, passes))
    if not places or not Readout(plan).width:
        return ()
    other = torch.arange(plan.samples, device=leaves[places[0]].device).flip(0) // 2
    try:
        whole, part = _losses(passes), _losses(_with(passes, places, other, None))
    except Exception:  # whatever it is, the program does not take other batches
        return ()
    return places if alike(part, whole[other.to(whole.device)]) else ()


def resampled(plan: NoisePlan, passes: Passes, places: Sequence[int], noise: Noise) -> tuple[Passes, Tensor, Any]:
    """The passes of a batch that was drawn again; the losses of the batch as it is, and what came with them."""
    readout = Readout(plan)
    losses, aux = passes.look_at_losses(plan, readout)
    with torch.no_grad():
        chance = chances(readout.slopes)
        bits = noise.rows(len(plan.sites), 0, 1, chance.new_empty(_BITS)) > 0
        powers = torch.arange(1, _BITS + 1, dtype=chance.dtype, device=chance.device)
        chosen, weights = drawn_again(chance, (bits.flatten() * 2.0**-powers).sum())
        return _with(passes, places, chosen, weights), losses, aux


def _is_of_samples(leaf: Any, plan: NoisePlan, passes: Passes) -> bool:
    if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.shape[0] != plan.samples:
        return False
    return passes.parameters.find(leaf) is None


def _with(passes: Passes, places: Sequence[int], chosen: Tensor, weights: Tensor | None) -> Passes:
    """The passes with other samples in the places of the batch's."""
    leaves, structure = _torch.pytree.tree_flatten(list(passes.program.batch))
    for place in places:
        leaves[place] = leaves[place].index_select(0, chosen.to(leaves[place].device))
    program = replace(passes.program, batch=_torch.pytree.tree_unflatten(leaves, structure))
    return replace(passes, program=program, weights=weights, first=[])


def _losses(passes: Passes) -> Tensor:
    program: LossProgram = passes.program

    def run() -> Tensor:
        with torch.no_grad():
            return program()[0]

    found: Tensor = passes.replay.run(run)
    return found
