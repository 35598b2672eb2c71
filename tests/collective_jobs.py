"""Programs with collectives, written once for processes and for one process that plays all of them.

A *world* holds what its processes have: one value for this process, or a list with one for each of those it plays. The
programs speak to it alone, so what processes find can be compared with double backward in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F

import jetplane as jp
from jetplane import optim
from jetplane.testing.oracle import double_backward
from many_processes import Place, batch, cuts, flat, message, seeded

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


# -- other derivatives, other operations ------------------------------------------------------------------------------


def other_derivatives(place: Place) -> dict[str, Tensor]:
    """Of one program: jvp, Hessian, a part of the directions at a time, Gauss-Newton, and in place."""
    theta, world = numbers(6, 3, seed=5) / 2, Real(place, "functional")

    def program(theta: Tensor) -> Tensor:
        found: Tensor = reduced(world, theta)[0]
        return found

    def model_and_loss(theta: Tensor) -> Tensor:
        z = gathered_logits(world, theta)[0]
        return F.cross_entropy(z, torch.arange(z.shape[0]) % 3)

    found = {"hessian": jp.hessian(program, theta)}
    found["value"], found["jvp"] = jp.jvp(program, (theta,), (directions()[0],))
    found["chunks"] = jp.quadratic(program, theta, directions(), chunk_size=1).curvature
    found["ggn"] = jp.quadratic(model_and_loss, theta, directions(), curvature="ggn").curvature
    with jp.perturb([theta], [directions()]) as jets:
        loss = program(theta)
    found["perturbed"] = jets.quadratic(loss).curvature
    return found


def gathered_logits(world: Any, theta: Tensor) -> Values:
    h = world.each(lambda rank: torch.tanh(numbers(2, 6, seed=rank) @ theta))
    return world.all_gather(h)


def expected_others(size: int, rank: int) -> dict[str, Tensor]:
    """The same by autograd, in one process."""
    theta = numbers(6, 3, seed=5) / 2

    def program(theta: Tensor) -> Tensor:
        found: Tensor = reduced(Played(size), theta)[rank]
        return found

    def logits(theta: Tensor) -> Tensor:
        found: Tensor = gathered_logits(Played(size), theta)[rank]
        return found

    flat = directions().flatten(1)
    hessian = torch.autograd.functional.hessian(program, theta)
    curvature = flat @ hessian.reshape(18, 18) @ flat.T
    gradient = torch.autograd.functional.jacobian(program, theta)
    jacobian = torch.autograd.functional.jacobian(logits, theta).reshape(-1, 18)
    z = logits(theta)
    of_loss = torch.autograd.functional.hessian(lambda z: F.cross_entropy(z, torch.arange(z.shape[0]) % 3), z)
    moved = flat @ jacobian.T
    return {
        "hessian": hessian,
        "value": program(theta),
        "jvp": (gradient * directions()[0]).sum(),
        "chunks": curvature,
        "ggn": moved @ of_loss.reshape(z.numel(), z.numel()) @ moved.T,
        "perturbed": curvature,
    }


def rarer(place: Place) -> list[Tensor]:
    """Operations of c10d that fewer programs use, on exp(theta) (2 + rank): value and second derivative of each."""
    group, size, rank = place.group, place.size, place.rank

    def program(theta: Tensor) -> list[Tensor]:
        x = theta.exp() * (2.0 + rank)  # (3,)
        into = torch.zeros_like(x)
        distributed.reduce(into.add_(x), size - 1, group=group)
        parts = [torch.zeros_like(x) for _ in range(size)]
        distributed.gather(x, parts if rank == 0 else None, 0, group=group)
        given = torch.zeros_like(x)
        distributed.scatter(given, [x * (n + 1) for n in range(size)] if rank == 0 else None, 0, group=group)
        one, two = x.clone(), x.square()
        with distributed._coalescing_manager(group, async_ops=False):
            distributed.all_reduce(one, group=group)
            distributed.all_reduce(two, group=group)
        both = functional.all_gather_into_tensor_coalesced([x, x.square()], group)
        some = functional.reduce_scatter_tensor_coalesced([x.repeat(size)], "sum", [0], group)
        spread = distributed.nn.functional.all_to_all(
            [torch.zeros_like(x) for _ in range(size)], [x * n for n in range(size)], group
        )
        ops, name = torch.ops._c10d_functional, group.group_name
        written = [x.clone(), x.clone(), x.clone(), x.new_zeros(size * 3), x.new_zeros(3)]
        ops.all_reduce_(written[0], "sum", name)
        ops.broadcast_(written[1], 0, name)
        ops.all_reduce_coalesced_([written[2]], "avg", name)
        ops.all_gather_into_tensor_out(x, size, name, out=written[3])
        ops.reduce_scatter_tensor_out(x.repeat(size), "sum", size, name, out=written[4])
        counts = torch.tensor([rank + 1])
        distributed.all_reduce(counts, group=group)  # whole numbers have no derivative
        with torch.no_grad():
            constant = x.clone()
            distributed.all_reduce(constant, group=group)
        return [into, *parts, given, one, two, *both, *some, *spread, *written, x * counts.item(), x * constant]

    theta = numbers(3, seed=3)
    jets = jp.jet(program, theta, torch.ones(1, 3, dtype=F64), "diagonal")
    return [torch.cat([value, second[0]]) for value, second in zip(jets.primal, jets.second, strict=True)]


def expected_rarer(size: int, rank: int) -> list[Tensor]:
    """The same by hand: the second derivative of exp(theta) is exp(theta), of its square four times that."""
    e = numbers(3, seed=3).exp()
    xs = [e * (2.0 + other) for other in range(size)]
    x, zero = xs[rank], torch.zeros_like(e)
    total, squares = sum(xs[1:], xs[0]), sum((one.square() for one in xs[1:]), xs[0].square())
    once = [total if rank == size - 1 else x, *(xs if rank == 0 else [zero] * size), xs[0] * (rank + 1), total]
    found = [torch.cat([value, value]) for value in once]
    found += [torch.cat([squares, 4 * squares])]
    found += [
        torch.cat([torch.cat(xs)] * 2),
        torch.cat([torch.cat(xs) ** 2, 4 * torch.cat(xs) ** 2]),
    ]
    found += [torch.cat([value, value]) for value in [total, *(one * rank for one in xs)]]
    found += [torch.cat([value, value]) for value in (total, xs[0], total / size, torch.cat(xs), total)]
    count = size * (size + 1) / 2
    return [*found, torch.cat([x * count, x * count]), torch.cat([x * total, x * total])]


class Synchronised(nn.Module):
    """A batch norm over all processes; torch's own module refuses the CPU, and its function does not."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.modules._functions import SyncBatchNorm

        h, norm = self.first(x), self.norm
        if self.group is None:
            h = norm(h)
        else:
            parts = h, norm.weight, norm.bias, norm.running_mean, norm.running_var
            h = SyncBatchNorm.apply(*parts, norm.eps, norm.momentum, self.group, self.group.size())
        found: Tensor = self.last(h.tanh())
        return found


def synchronised(place: Place | None = None) -> dict[str, Tensor]:
    """Steps with a batch norm over all samples, with the shards of processes or in one."""
    model = seeded(lambda: Synchronised(None if place is None else place.group))
    x, y = batch()
    start, stop = (0, len(x)) if place is None else cuts(place.size)[place.rank]
    options = {} if place is None else {"process_group": place.group, "check_every": 1}
    opt = optim.FoMoHKD(model.parameters(), 0.1, 2, **options)
    for _ in range(3):
        opt.step(lambda x, y: F.cross_entropy(model(x), y), x[start:stop], y[start:stop])
    assert isinstance(model.norm.running_var, Tensor) and isinstance(model.norm.running_mean, Tensor)
    return {"parameters": flat(model), "mean": model.norm.running_mean, "var": model.norm.running_var}


def weighed(place: Place) -> Tensor:
    """A forward gradient along weights, whose numbers are slopes: J of them, of the mean over processes."""
    theta, world = (numbers(6, 3, seed=5) / 2).requires_grad_(), Real(place, "functional")
    estimate = jp.ForwardGradient([theta], 400, estimator="weight", process_group=place.group)
    estimate(lambda x: reduced(world, theta)[0] + 0 * x[:, 0], torch.ones(1, 1, dtype=F64))
    assert theta.grad is not None
    return theta.grad


# -- what is refused --------------------------------------------------------------------------------------------------


def disagreements(place: Place) -> dict[str, str]:
    """Processes that do not do the same, and what has no rule."""
    group, rank = place.group, place.rank
    theta = numbers(3, seed=1)
    world = Real(place, "functional")

    def along(count: int, program: Callable[[Tensor], Tensor], theta: Tensor = theta) -> Any:
        return jp.quadratic(program, theta, numbers(count, *theta.shape))

    def back() -> None:
        x = theta.clone().requires_grad_()
        slope = jp.quadratic(lambda x: functional.all_reduce(x.exp(), "sum", group).sum(), x, numbers(1, 3)).slope
        slope.sum().backward()

    def estimated() -> None:
        model = seeded(lambda: nn.Linear(5, 3))
        estimate = jp.ForwardGradient(model.parameters(), process_group=group)
        estimate(lambda x: functional.all_reduce(model(x), "sum", group).sum(1), batch()[0])

    return {
        "K": message(lambda: along(1 + rank, lambda x: functional.all_reduce(x.exp(), "sum", group).sum())),
        "order": message(
            lambda: along(
                1,
                lambda x: (
                    functional.broadcast(x.exp(), 0, group) if rank else functional.all_reduce(x.exp(), "sum", group)
                ).sum(),
            )
        ),
        "send": message(lambda: along(1, lambda x: distributed.send(x.exp(), 1 - rank, group) or x.sum())),
        "coalesced maximum": message(
            lambda: along(1, lambda x: functional.all_reduce_coalesced([x.exp()], "max", group)[0].sum())
        ),
        "shapes": message(
            lambda: along(
                1, lambda x: distributed.all_gather([x.new_empty(3), x.new_empty(4)], x.exp(), group) or x.sum()
            )
        ),
        "other shapes": message(
            lambda: along(1, lambda x: distributed.reduce_scatter(x.new_empty(3), [x, x[:2]], group=group) or x.sum())
        ),
        "back": message(back),
        "ForwardGradient": message(estimated),
        "early and late": message(
            lambda: jp.quadratic(
                lambda x: F.mse_loss(
                    functional.all_reduce(x.exp() if rank else jp.mark_output(x.exp()), "sum", group), x.detach()
                ),
                theta,
                numbers(1, 3),
                curvature="ggn",
            )
        ),
        "world": str(world.size),
    }


def absent(place: Place) -> str:
    """A process that does not come: the last of the jobs, for the groups are broken behind it."""
    group = distributed.new_group(timeout=timedelta(seconds=2))
    if place.rank == 1:
        time.sleep(3)
        return "slept"
    x = numbers(3)
    return message(lambda: jp.jvp(lambda x: functional.all_reduce(x.exp(), "sum", group), (x,), (x,)))


def short_jobs() -> dict[str, Callable[[Place], Any]]:
    """What two processes do in every run of the tests."""
    found = all_programs()
    jobs: tuple[Callable[[Place], Any], ...]
    jobs = (other_derivatives, rarer, synchronised, weighed, disagreements, absent)
    return {**found, **{job.__name__: job for job in jobs}}


def all_programs() -> dict[str, Callable[[Place], Any]]:
    """What four do in the slow tests."""
    return {f"{name}, {form}": partial(differentiated, name, form) for name in PROGRAMS for form in FORMS}
