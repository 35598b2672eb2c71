"""Programs with collectives, written once for processes and for one process that plays all of them.

A *world* holds what its processes have: one value for this process, or a list with one for each of those it plays. The
programs speak to it alone, so what processes find can be compared with double backward in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F

import jetplane as jp
from jetplane import optim
from jetplane.directions import Gaussian
from jetplane.testing.oracle import double_backward
from many_processes import Place, message

F64 = torch.float64
Values = list[Any]  # of the processes that this one is, or plays


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that are the same everywhere."""
    count = int(torch.Size(shape).numel())
    return torch.sin((torch.arange(count, dtype=F64) + 1 + 7 * seed) ** 2).reshape(shape)


def splits(size: int) -> list[list[int]]:
    """How many tokens each process sends to each: uneven, and none in places."""
    return [[(rank + 2 * other) % 3 for other in range(size)] for rank in range(size)]


# -- worlds -----------------------------------------------------------------------------------------------------------


class Played:
    """One process that plays all of ``size``, without collectives."""

    def __init__(self, size: int) -> None:
        self.size, self.ranks = size, list(range(size))

    def each(self, make: Callable[..., Any], *values: Values) -> Values:
        return [make(rank, *one) for rank, *one in zip(self.ranks, *values, strict=True)]

    def all_reduce(self, values: Values, how: str = "sum") -> Values:
        stacked = torch.stack(values)
        reduce = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin, "product": torch.prod}
        return [reduce[how](stacked, 0)] * self.size

    def all_gather(self, values: Values) -> Values:
        return [torch.cat(values)] * self.size

    def reduce_scatter(self, values: Values, how: str = "sum") -> Values:
        return list(self.all_reduce(values, how)[0].chunk(self.size))

    def all_to_all(self, values: Values) -> Values:
        cuts = splits(self.size)
        sent = [value.split(cuts[rank]) for rank, value in enumerate(values)]
        return [torch.cat([sent[other][rank] for other in self.ranks]) for rank in self.ranks]

    def broadcast(self, values: Values, source: int) -> Values:
        return [values[source]] * self.size


class Real:
    """This process among the others, with collectives of one form."""

    def __init__(self, place: Place, form: str) -> None:
        self.size, self.ranks, self.place, self.form = place.size, [place.rank], place, form

    def each(self, make: Callable[..., Any], *values: Values) -> Values:
        return [make(rank, *one) for rank, *one in zip(self.ranks, *values, strict=True)]

    def _finish(self, work: Any) -> None:
        if self.form == "async":
            work.wait()
            assert work.is_completed()

    def all_reduce(self, values: Values, how: str = "sum") -> Values:
        (x,), group = values, self.place.group
        op = getattr(distributed.ReduceOp, how.upper())
        if self.form == "functional":
            return [functional.all_reduce(x, how, group)]
        if self.form == "nn":
            return [distributed.nn.functional.all_reduce(x, op, group)]
        x = x.clone()
        self._finish(distributed.all_reduce(x, op, group, async_op=self.form == "async"))
        return [x]

    def all_gather(self, values: Values) -> Values:
        (x,), group = values, self.place.group
        if self.form == "functional":
            return [functional.all_gather_tensor(x, 0, group)]
        if self.form == "nn":
            return [torch.cat(distributed.nn.functional.all_gather(x, group))]
        if self.form == "async":
            out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
            self._finish(distributed.all_gather_into_tensor(out, x, group, async_op=True))
            return [out]
        parts = [torch.empty_like(x) for _ in range(self.size)]
        distributed.all_gather(parts, x, group)
        return [torch.cat(parts)]

    def reduce_scatter(self, values: Values, how: str = "sum") -> Values:
        (x,), group = values, self.place.group
        op = getattr(distributed.ReduceOp, how.upper())
        if self.form == "functional":
            return [functional.reduce_scatter_tensor(x, how, 0, group)]
        parts = list(x.chunk(self.size))
        if self.form == "nn":
            return [distributed.nn.functional.reduce_scatter(torch.empty_like(parts[0]), parts, op, group)]
        out = torch.empty_like(parts[0])
        if self.form == "async":
            self._finish(distributed.reduce_scatter_tensor(out, x, op, group, async_op=True))
        else:
            distributed.reduce_scatter(out, parts, op, group)
        return [out]

    def all_to_all(self, values: Values) -> Values:
        (x,), group, cuts = values, self.place.group, splits(self.size)
        sent, received = cuts[self.place.rank], [row[self.place.rank] for row in cuts]
        if self.form == "functional":
            return [functional.all_to_all_single(x, received, sent, group)]
        out = x.new_empty(sum(received), *x.shape[1:])
        if self.form == "nn":
            return [distributed.nn.functional.all_to_all_single(out, x, received, sent, group)]
        if self.form == "async":
            self._finish(distributed.all_to_all_single(out, x, received, sent, group, async_op=True))
            return [out]
        parts = list(out.split(received))
        distributed.all_to_all(parts, list(x.split(sent)), group)
        return [torch.cat(parts)]

    def broadcast(self, values: Values, source: int) -> Values:
        (x,), group = values, self.place.group
        if self.form == "functional":
            return [functional.broadcast(x, source, group)]
        if self.form == "nn":
            return [distributed.nn.functional.broadcast(x, source, group)]
        x = x.clone() if self.place.rank == source else torch.zeros_like(x)
        self._finish(distributed.broadcast(x, source, group, async_op=self.form == "async"))
        return [x]


# -- programs: of a world and shared parameters, a loss for each process ----------------------------------------------


def reduced(world: Any, theta: Tensor, how: str = "sum") -> Values:
    """A sum in the middle, and one of losses at the end."""
    h = world.all_reduce(world.each(lambda rank: torch.tanh(numbers(4, 6, seed=rank) @ theta) + 1.5), how)
    loss = world.each(lambda rank, h: (h * numbers(4, 3, seed=9 + rank)).sin().square().sum(), h)
    return world.each(lambda rank, one, mean: one + mean.square(), loss, world.all_reduce(loss, "avg"))


def gathered(world: Any, theta: Tensor) -> Values:
    h = world.each(lambda rank: torch.tanh(numbers(2, 6, seed=rank) @ theta))
    return world.each(lambda rank, h: (h @ h.T).exp().sum() * (1 + rank), world.all_gather(h))


def scattered(world: Any, theta: Tensor) -> Values:
    h = world.each(lambda rank: torch.tanh(numbers(2 * world.size, 6, seed=rank) @ theta))
    return world.each(lambda rank, h: h.pow(3).sum() + rank, world.reduce_scatter(h))


def routed(world: Any, theta: Tensor) -> Values:
    """Experts: tokens go to processes, are worked on there, and come back."""
    counts = splits(world.size)
    tokens = world.each(lambda rank: torch.sin(numbers(sum(counts[rank]), 6, seed=rank) @ theta))
    worked = world.each(lambda rank, x: (x * (rank + 1.0)).tanh() * theta[rank % 6], world.all_to_all(tokens))
    return world.each(lambda rank, x: x.exp().sum(), worked)


def sent(world: Any, theta: Tensor) -> Values:
    h = world.each(lambda rank: torch.tanh(theta * (rank + 1)))
    return world.each(lambda rank, h: (h * h * theta.exp()).sum() + rank, world.broadcast(h, world.size - 1))


def half(world: Any, theta: Tensor) -> Values:
    """One process alone has something that varies."""
    h = world.each(lambda rank: theta.exp() if rank == 0 else numbers(6, 3))
    return world.each(lambda rank, h: h.square().sum(), world.all_reduce(h))


PROGRAMS: dict[str, Callable[..., Values]] = {
    "reduced": reduced,
    "average": partial(reduced, how="avg"),
    "maximum": partial(reduced, how="max"),
    "minimum": partial(reduced, how="min"),
    "product": partial(reduced, how="product"),
    "gathered": gathered,
    "scattered": scattered,
    "routed": routed,
    "sent": sent,
    "half": half,
}
FORMS = ("functional", "plain", "async", "nn")
K = 3


def directions() -> Tensor:
    return numbers(K, 6, 3, seed=77)


def expected(name: str, size: int) -> list[dict[str, Tensor]]:
    """What each process should find, by double backward in one."""
    found = []
    for rank in range(size):
        theta = (numbers(6, 3, seed=5) / 2).requires_grad_()
        quadratic = double_backward(lambda: PROGRAMS[name](Played(size), theta)[rank], [theta], [directions()])  # noqa: B023
        found.append({"loss": quadratic.loss, "slope": quadratic.slope, "curvature": quadratic.curvature})
    return found


def differentiated(name: str, form: str, place: Place) -> dict[str, Tensor]:
    """What this process finds."""
    theta, world = numbers(6, 3, seed=5) / 2, Real(place, form)
    quadratic = jp.quadratic(lambda theta: PROGRAMS[name](world, theta)[0], theta, directions())
    return {"loss": quadratic.loss, "slope": quadratic.slope, "curvature": quadratic.curvature}


def jobs() -> dict[str, Callable[[Place], Any]]:
    """What the processes do."""
    found: dict[str, Callable[[Place], Any]] = {}
    for name in PROGRAMS:
        for form in FORMS:
            found[f"{name}, {form}"] = partial(differentiated, name, form)
    return found
