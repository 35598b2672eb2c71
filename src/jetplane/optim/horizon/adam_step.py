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
from . import eigenbasis
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
_COUNT, _RATE, _LEAD, _FIRST, _TREND = range(5)
PATH = ("count", "rate", "lead", "first", "trend")  # what the numbers of the path are called

AnyReplay = Replay | ReplayTraced


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
    taken = torch.isfinite(loss) & torch.stack([torch.isfinite(grad).all() for grad in grads]).all()
    taken = held.parts.everywhere(taken)
    held.numbers[_COUNT] += taken
    if rules.forget:
        held.forgetting.see(held.tensors, grads, _horizon(held), taken, held.parts)
    directions: Iterable[Tensor] = _directions(rules, held, grads, taken, first is not None)
    if first is not None:
        directions = list(directions)  # else they are made one by one, as the parameters move
        held.numbers[_RATE] = held.leaves[0].rate if rules.fixed else _first_rate(held, first(directions))
        held.numbers[_FIRST] = loss
    elif seen is not None:
        _follow(rules, held, seen)
    _move(rules, held, directions, loss, taken)
    _, rate, lead, *_ = held.numbers.unbind()
    return StepTaken(rate.clone(), lead.clone(), taken)


def _directions(rules: Rules, held: Course, grads: Sequence[Tensor], taken: Tensor, is_first: bool) -> Iterator[Tensor]:
    """Adam's directions, downhill."""
    share, corrections = 1 / _horizon(held), dict[Any, tuple[Tensor, Tensor]]()
    for place, (leaf, grad) in enumerate(zip(held.leaves, grads, strict=True)):
        first, second = leaf.betas
        alike = leaf.begun, first, second
        if alike not in corrections:
            count = held.numbers[_COUNT] - leaf.begun
            corrections[alike] = 1 - first**count, (1 - second**count).sqrt()
        eigenbasis.see(leaf.state, grad, share, taken, partial(held.parts.moment, place=place))
        if is_first or leaf.new:
            eigenbasis.refresh(leaf.state)
        yield _direction(rules, leaf, grad, taken, corrections[alike])


def _direction(
    rules: Rules, leaf: MovingLeaf, grad: Tensor, taken: Tensor, corrections: tuple[Tensor, Tensor]
) -> Tensor:
    """That of one parameter. In place where it can be: parameters may be as large as all else."""
    state, (first, second) = leaf.state, leaf.betas
    mean, square, turned = state["exp_avg"], state["exp_avg_sq"], eigenbasis.away(state, grad)
    mean.copy_(torch.where(taken, _lerp(mean, turned, 1 - first), mean))
    square.copy_(torch.where(taken, _lerp(square, turned * turned, 1 - second), square))
    del turned
    size = eigenbasis.floored(state, square.sqrt().div_(corrections[1].to(square)))
    size = size.add_(max(rules.eps, _least(square.dtype)))
    return eigenbasis.back(state, (mean / corrections[0].to(mean)).neg_().div_(size))


def _least(dtype: torch.dtype) -> float:
    """The root of the least square that a dtype has: of float16 a smaller gradient has none, and eps is zero."""
    numbers = torch.finfo(dtype)
    return (numbers.smallest_normal * numbers.eps) ** 0.5


def _lerp(mean: Tensor, new: Tensor, share: Any) -> Tensor:
    return torch.lerp(mean, new, share.to(mean) if isinstance(share, Tensor) else share)


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


def _move(rules: Rules, held: Course, directions: Iterable[Tensor], loss: Tensor, taken: Tensor) -> None:
    count, rate, *_ = held.numbers
    horizon, shares, weights = _horizon(held), _shares(rules, held, loss), dict[Any, Tensor]()
    for position, (leaf, direction) in enumerate(zip(held.leaves, directions, strict=True)):
        length = leaf.lr * (rate if leaf.rate is None else torch.ones_like(rate) * leaf.rate)
        kept = 1 - length * leaf.decay
        if position in shares:
            kept = kept * (1 - leaf.lr * shares[position]).clamp_min(0)
        if leaf.begun not in weights:
            weights[leaf.begun] = _weight(rules, count - leaf.begun)
        moved = (leaf.tensor * kept.to(leaf.tensor)).add_(direction.mul_(length.to(leaf.tensor)))
        leaf.tensor.copy_(torch.where(taken, moved, leaf.tensor))
        del moved, direction
        # what is pulled to zero is no part of the path: its lead would be that of the pull
        trail = leaf.state["trail"]
        trail.copy_(torch.where(taken, trail * kept.to(trail), trail))
        for name, share in (("trail", 1 / horizon), ("average", weights[leaf.begun])):
            mean = leaf.state[name]
            mean.copy_(torch.where(taken, (leaf.tensor - mean).mul_(share.to(mean)).add_(mean), mean))


def _weight(rules: Rules, count: Tensor) -> Tensor:
    """Of the last of ``count`` steps, in the average."""
    return rules.power / (count + rules.power) if rules.power else torch.ones_like(count)
