"""One step of HorizonAdam as functions of tensors: run as they are, and traced.

A step looks back along its path now and then, estimates the gradient, shapes it as Adam's, follows what it saw of the
path, and moves. Nothing in it asks the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ad.run.parts import whole_like
from ...ad.run.replay import Replay
from ...ad.run.replay_traced import ReplayTraced
from . import bunches, eigenbasis
from .bunches import all_finite
from .forgetting import Forgetting
from .held_parts import ALL_HERE, AllHere
from .path import Along, Path

__all__ = [
    "PATH",
    "Course",
    "LookBack",
    "MovingLeaf",
    "Rules",
    "StepTaken",
    "clipped",
    "fresh",
    "look_back",
    "return_",
    "take",
]

_GAIN = 2.0  # e-foldings of the rate within a horizon, at most
_SHORTEST = 20.0  # steps: horizon at the start
_SHARE = 0.25  # of all steps: horizon later on
_CAUTIOUS = 1e-2  # of the step that is best on the first batch, which is far too long for a noisy direction
_BELIEVED, _MODERATE = 0.3, 0.03  # of the parameters' mean size: a first step longer than the one is the other
_THROWN = 0.1  # of the first loss: so much above the loss at the trailing mean is no noise
_CANCELLED = 1.001  # times the mean's: a larger mean size is no rounding, losses of both signs are in it
_COUNT, _RATE, _LEAD, _FIRST, _TREND = range(5)
PATH = ("count", "rate", "lead", "first", "trend")  # what the numbers of the path are called

AnyReplay = Replay | ReplayTraced
Directed = tuple[list[int], list[Tensor]]  # a bunch of parameters by their places, and a direction for each


class Rules(NamedTuple):
    """The optimizer's settings, which a trace has baked in."""

    every: int
    power: float
    eps: float
    forget: float
    fixed: bool  # whether the rate of every group is given


class MovingLeaf(NamedTuple):
    """A parameter that moves, and the numbers of its group: numbers, or tensors () where they change on a device."""

    tensor: Tensor
    state: dict[str, Tensor]
    lr: Any
    decay: Any
    rate: Any  # None where it is to be found
    betas: tuple[Any, Any]
    begun: Any  # the number of steps that were taken without it
    new: bool = False  # whether this step is the first for it


@dataclass(frozen=True, eq=False)
class Course:
    """What a step reads and writes."""

    leaves: Sequence[MovingLeaf]
    numbers: Tensor  # (5,) of the path
    forgetting: Forgetting
    path: Path
    parts: AllHere = ALL_HERE

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters."""
        return [leaf.tensor for leaf in self.leaves]

    @property
    def trail(self) -> list[Tensor]:
        """The trailing means of the parameters, whole."""
        return self.parts.wholes([leaf.state["trail"] for leaf in self.leaves])


class LookBack(NamedTuple):
    """A look back along the path."""

    along: Along
    new: Tensor | bool = True  # (): whether there was one before this step


class StepTaken(NamedTuple):
    """A step."""

    rate: Tensor
    lead: Tensor
    taken: Tensor  # whether the parameters were moved


def fresh(leaf: Tensor, rotate: bool) -> dict[str, Tensor]:
    """What is kept for a parameter, before the first step."""
    start = leaf.detach()
    zeros = torch.zeros_like(start)
    axes = eigenbasis.fresh(whole_like(start)) if rotate else {}
    return {"exp_avg": zeros, "exp_avg_sq": zeros.clone(), "trail": start.clone(), "average": start.clone(), **axes}


def clipped(grads: Sequence[Tensor], most: float | None, parts: AllHere = ALL_HERE) -> Sequence[Tensor]:
    """Gradients of a norm of at most ``most``, all together, as ``torch.nn.utils.clip_grad_norm_`` has them.

    Example:
        >>> clipped([torch.tensor([3.0]), torch.tensor([4.0])], 1.0)
        [tensor([0.6000]), tensor([0.8000])]
    """
    if most is None:
        return grads
    total = parts.norm(grads)
    factor = (most / (total + 1e-6)).clamp(max=1.0)
    return [grad * factor.to(grad) for grad in grads]


def look_back(held: Course, losses: Sequence[Callable[[], Tensor]], replay: AnyReplay) -> Along:
    """Measure the path from the trailing mean to here, and :func:`return_` there where it was too far."""
    seen = held.path.since(held.trail, losses, replay)
    return_(held, seen)
    return seen


def return_(held: Course, seen: Along) -> None:
    """Go back to the trailing mean where the parameters were thrown far off.

    To halve the rate alone would not do: they would stay where they are, and the rate be halved again and again.
    """
    thrown = _thrown(held, seen)
    for leaf, state, *_ in held.leaves:
        leaf.copy_(torch.where(thrown, state["trail"], leaf))
        state["exp_avg"].copy_(torch.where(thrown, 0.0, state["exp_avg"]))


def take(
    rules: Rules,
    held: Course,
    loss: Tensor,
    grads: Sequence[Tensor],
    seen: LookBack | None,
    first: Callable[[Sequence[Tensor]], Along] | None = None,
) -> StepTaken:
    """Move by an estimate of the gradient, after what was ``seen`` of the path; ``first`` measures the first step."""
    taken = held.parts.everywhere(torch.isfinite(loss) & all_finite(list(grads)))
    held.numbers[_COUNT] += taken
    if rules.forget:
        held.forgetting.see(held.tensors, grads, _horizon(held), taken, held.parts)
    directions: Iterable[Directed] = _directions(rules, held, grads, taken, first is not None)
    if first is not None:
        directions = list(directions)  # else they are made bunch by bunch, as the parameters move
        held.numbers[_RATE], held.numbers[_FIRST] = _begun(rules, held, loss, first, directions)
    elif seen is not None:
        known = torch.isfinite(held.numbers[_FIRST])
        held.numbers[_FIRST] = torch.where(known, held.numbers[_FIRST], _sized(loss, seen.along))
        _follow(rules, held, seen)
    _move(rules, held, directions, loss, taken)
    _, rate, lead, *_ = held.numbers.unbind()
    return StepTaken(rate.clone(), lead.clone(), taken)


def _directions(
    rules: Rules, held: Course, grads: Sequence[Tensor], taken: Tensor, is_first: bool
) -> Iterator[Directed]:
    """Adam's directions, downhill, by bunch: the places of its parameters, and theirs."""
    share, corrections = 1 / _horizon(held), dict[Any, tuple[Tensor, Tensor]]()
    kinds = (_kind(held, place) for place in range(len(held.leaves)))
    for places in bunches.bunches(held.tensors, kinds, _bytes(held)):
        some, found = [held.leaves[place] for place in places], [grads[place] for place in places]
        first, second = some[0].betas
        alike = some[0].begun, first, second
        if alike not in corrections:
            count = held.numbers[_COUNT] - some[0].begun
            corrections[alike] = 1 - first**count, (1 - second**count).sqrt()
        sums = [partial(held.parts.moment, place=place) for place in places]
        eigenbasis.see([leaf.state for leaf in some], found, share, taken, sums)
        fresh_ones = [leaf.state for leaf in some if is_first or leaf.new]
        if fresh_ones:
            eigenbasis.refresh(fresh_ones)
        yield places, _direction(rules, some, found, taken, corrections[alike])


def _kind(held: Course, place: int) -> Any:
    """What the numbers of a parameter's step are told by: the same for all of a bunch."""
    leaf = held.leaves[place]
    numbers = [leaf.lr, leaf.decay, leaf.rate, *leaf.betas, leaf.begun]
    return held.forgetting.pulls(place), *[id(one) if isinstance(one, Tensor) else one for one in numbers]


def _bytes(held: Course) -> list[int]:
    """What each parameter takes in a bunch. Of parts all processes must take the same order: one by one."""
    if held.parts is not ALL_HERE:
        return [bunches.AT_ONCE] * len(held.leaves)
    return [leaf.tensor.nbytes + eigenbasis.held(leaf.state) for leaf in held.leaves]


def _in_order(directions: Iterable[Directed]) -> list[Tensor]:
    """By parameter."""
    found = {place: one for places, some in directions for place, one in zip(places, some, strict=True)}
    return [found[place] for place in sorted(found)]


def _direction(
    rules: Rules, some: Sequence[MovingLeaf], grads: Sequence[Tensor], taken: Tensor, corrections: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """Those of a bunch."""
    (first, second), states = some[0].betas, [leaf.state for leaf in some]
    means, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
    turned = [eigenbasis.away(state, grad) for state, grad in zip(states, grads, strict=True)]
    bunches.keep(taken, _lerped(means, turned, 1 - first), means)
    bunches.keep(taken, _lerped(squares, bunches.times(turned, turned), 1 - second), squares)
    del turned
    sizes = bunches.sizes(squares, corrections[1].to(squares[0]))
    sizes = [eigenbasis.floored(state, size) for state, size in zip(states, sizes, strict=True)]
    bunches.plus(sizes, max(rules.eps, _least(squares[0].dtype)))
    found = bunches.against(bunches.divided(means, corrections[0].to(means[0])), sizes)
    return [eigenbasis.back(state, one) for state, one in zip(states, found, strict=True)]


def _least(dtype: torch.dtype) -> float:
    """The root of the least square that a dtype has: of float16 a smaller gradient has none, and eps is zero."""
    numbers = torch.finfo(dtype)
    return (numbers.smallest_normal * numbers.eps) ** 0.5


def _lerped(means: list[Tensor], new: list[Tensor], share: Any) -> list[Tensor]:
    return bunches.lerped(means, new, share.to(means[0]) if isinstance(share, Tensor) else share)


def _begun(
    rules: Rules, held: Course, loss: Tensor, first: Callable[[Sequence[Tensor]], Along], directions: list[Directed]
) -> tuple[Any, Tensor]:
    """The rate of the first step, and the first loss."""
    if rules.fixed:
        return held.leaves[0].rate, loss
    along = first(_in_order(directions))
    return _first_rate(held, along), _sized(loss, along)


def _sized(loss: Tensor, along: Along) -> Tensor:
    """The mean loss; where losses cancel, as those of a policy's gradient, the mean of their sizes."""
    return torch.where(along.size > _CANCELLED * loss.abs(), along.size, loss)


def _thrown(held: Course, seen: Along) -> Tensor:
    return seen.rise > _THROWN * held.numbers[_FIRST].abs()


def _follow(rules: Rules, held: Course, seen: LookBack) -> None:
    """The rate after a look back; where there was none, it stays."""
    lead, new = seen.along.best, torch.as_tensor(seen.new, device=held.numbers.device)
    horizon = torch.clamp_min(_SHARE * held.numbers[_COUNT], _SHORTEST)
    urge = torch.where(lead > 0, lead.clamp_max(1), (lead + 0.5).clamp(-1, 0))
    urge = torch.where(torch.isfinite(lead), urge, -1.0)
    factor = torch.where(_thrown(held, seen.along), 0.5, torch.exp(_GAIN * rules.every / horizon * urge))
    if not rules.fixed:
        held.numbers[_RATE] *= torch.where(new, factor, 1.0)
    held.numbers[_LEAD] = torch.where(new, lead, held.numbers[_LEAD])
    # of one batch it is noisy, so weights are forgotten by its mean over the horizon, in which no batch weighs much
    step = (rules.every / horizon).clamp_max(1) * (lead.clamp(-0.5, 0.5) - held.numbers[_TREND])
    held.numbers[_TREND] += torch.where(torch.isfinite(lead) & new, step, 0.0)


def _first_rate(held: Course, along: Along) -> Tensor:
    best = along.best
    size = held.parts.sizes(held.tensors).mean()
    # where the batch has no best step along this direction: one that changes the parameters by little
    rate = torch.where(torch.isfinite(best) & (best > 0), _CAUTIOUS * best, 1e-4 * size + 1e-8)
    # a model of the loss that holds for so small parameters alone says nothing of so long a step: of inputs or
    # targets in the thousands, or of probabilities that are 0 and 1 at first
    return torch.where((size > 0) & (rate > _BELIEVED * size), _MODERATE * size, rate)


def _horizon(held: Course) -> Tensor:
    """In steps; there are not more than were taken, and the start."""
    count = held.numbers[_COUNT]
    return torch.minimum(torch.clamp_min(_SHARE * count, _SHORTEST), count + 1)


def _shares(rules: Rules, held: Course, loss: Tensor) -> dict[int, Tensor]:
    """By weight, the share of it that is forgotten in this step."""
    if not rules.forget:
        return {}
    *_, first, trend = held.numbers
    left = torch.where(first > 0, loss / first, 0.0)
    shares = held.forgetting.shares(trend, left, _horizon(held))
    return {position: rules.forget * share for position, share in shares.items()}


def _move(rules: Rules, held: Course, directions: Iterable[Directed], loss: Tensor, taken: Tensor) -> None:
    count, rate, *_ = held.numbers
    horizon, shares, weights = _horizon(held), _shares(rules, held, loss), dict[Any, Tensor]()
    for places, some in directions:
        leaves = [held.leaves[place] for place in places]
        one, tensors = leaves[0], [leaf.tensor for leaf in leaves]
        length = one.lr * (rate if one.rate is None else torch.ones_like(rate) * one.rate)
        kept = _kept(one, length, [shares[place] for place in places if place in shares])
        if one.begun not in weights:
            weights[one.begun] = _weight(rules, count - one.begun)
        moved = bunches.plus(bunches.times(tensors, kept), bunches.scaled(some, length.to(tensors[0])))
        bunches.keep(taken, moved, tensors)
        del moved, some
        # what is pulled to zero is no part of the path: its lead would be that of the pull
        trails, averages = ([leaf.state[name] for leaf in leaves] for name in ("trail", "average"))
        for means, shrunk, share in (
            (trails, bunches.times(trails, kept), 1 / horizon),
            (averages, averages, weights[one.begun]),
        ):
            bunches.keep(taken, bunches.followed(shrunk, tensors, share.to(tensors[0])), means)


def _kept(one: MovingLeaf, length: Tensor, shares: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """What a bunch like ``one`` is multiplied by: a number (), or, where shares of it are forgotten, one for each."""
    kept = 1 - length * one.decay
    if not shares:
        return kept.to(one.tensor)
    return (kept * (1 - one.lr * torch.stack(shares)).clamp_min(0)).to(one.tensor).unbind()


def _weight(rules: Rules, count: Tensor) -> Tensor:
    """Of the last of ``count`` steps, in the average."""
    return rules.power / (count + rules.power) if rules.power else torch.ones_like(count)
