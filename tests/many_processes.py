"""What tests of many processes share: problems, runs alone and in a group, and one launch of processes for all tests.

A launch takes seconds, most of them imports, so all that is to be seen in a group is done in one: ``jobs`` by name,
each a function of a :class:`Place` that gives tensors or texts.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import jetplane as jp
from jetplane import optim
from jetplane.directions import Gaussian, Grown
from jetplane.optim import Acceptance
from jetplane.parallel.processes import Processes
from jetplane.solvers import LevenbergMarquardt

COUNT = 12  # samples
F64 = torch.float64
Make = Callable[..., Any]


class Place(NamedTuple):
    """A process among the others."""

    rank: int
    size: int
    group: Any


# -- problems ---------------------------------------------------------------------------------------------------------


def batch() -> tuple[Tensor, Tensor]:
    x = torch.sin(torch.arange(COUNT * 5, dtype=F64) ** 2).reshape(COUNT, 5)
    return x, torch.arange(COUNT) * 7 % 3


def cuts(size: int) -> list[tuple[int, int]]:
    """Uneven shards."""
    ends = {1: [COUNT], 2: [5, COUNT], 4: [2, 5, 6, COUNT]}[size]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make().double()


def network() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)))


def normed(norms: int = 1) -> nn.Module:
    """With batch norms, which couple the samples of a process."""
    more = (norms - 1) * [(nn.Linear, 7, 7), (nn.BatchNorm1d, 7), (nn.Tanh,)]
    kinds = [(nn.Linear, 5, 7), (nn.BatchNorm1d, 7), (nn.Tanh,), *more, (nn.Linear, 7, 6), (nn.Linear, 6, 3)]
    return seeded(lambda: nn.Sequential(*(kind(*sizes) for kind, *sizes in kinds)))


def convex() -> nn.Module:
    """Of softmax regression: with a penalty nothing is chaotic, and rounding stays rounding for any number of steps."""
    return seeded(lambda: nn.Linear(5, 3))


class Recurrent(nn.Module):
    """Tokens first: the samples of its activations are not the first axis."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRU(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.stack([x, x.roll(1, 1), x.roll(2, 1)])
        hidden: Tensor = self.out(self.cell(steps)[0].mean(0))
        return hidden


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def losses(model: nn.Module, reduction: str) -> Callable[[Tensor, Tensor], Tensor]:
    penalised = isinstance(model, nn.Linear)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(model(x), y, reduction=reduction)
        return found + 0.05 * sum(p.square().sum() for p in model.parameters()) if penalised else found

    return loss


def meshed(place: Place, rows: int) -> tuple[Any, tuple[int, int]]:
    """A mesh in which processes of each of ``rows`` parts of a batch share the directions, and this one's part."""
    mesh = init_device_mesh("cpu", (rows, place.size // rows), mesh_dim_names=("data", "directions"))
    return mesh, cuts(rows)[mesh.get_local_rank("data")]


def columns(name: str, steps: int, place: Place, rows: int) -> Tensor:
    """The same in a mesh."""
    mesh, (start, stop) = meshed(place, rows)
    model, (x, y) = convex(), batch()
    maker, reduction = (SEARCHES | MORE)[name]
    opt, loss = maker(model.parameters(), process_group=mesh, check_every=1), losses(model, reduction)
    for _ in range(steps):
        opt.step(loss, x[start:stop], y[start:stop])
    return flat(model)


# -- runs -------------------------------------------------------------------------------------------------------------

SEARCHES: dict[str, tuple[Make, str]] = {
    "FGD": (lambda p, **o: optim.FGD(p, 0.05, 4, **o), "mean"),
    "FoMoH": (lambda p, **o: optim.FoMoH(p, 0.5, **o), "mean"),
    "FoMoHKD": (lambda p, **o: optim.FoMoHKD(p, 0.3, 2, **o), "mean"),
    "GaussNewtonSearch": (lambda p, **o: optim.GaussNewtonSearch(p, k=8, **o), "none"),
}
MORE: dict[str, tuple[Make, str]] = {
    "FoMoHBP": (lambda p, **o: optim.FoMoHBP(p, 0.5, **o), "mean"),
    "Newton": (lambda p, **o: optim.Newton(p, 0.5, **o), "mean"),
    "a filter of noise": (
        lambda p, **o: optim.FoMoHKD(p, 0.5, 3, curvature="ggn", solver=LevenbergMarquardt(), **o),
        "none",
    ),
    "the empirical Fisher": (
        lambda p, **o: optim.FoMoHKD(p, 0.5, 3, curvature="fisher", solver=LevenbergMarquardt(), **o),
        "none",
    ),
    "all options": (
        lambda p, **o: optim.FoMoHKD(
            p, 1.0, directions=Grown(Gaussian, 2, 4, 2, 2.0), clip=0.3, samples=2, chunk_size=1, maximize=False, **o
        ),
        "mean",
    ),
    "halving": (lambda p, **o: optim.FGD(p, 50.0, accept=Acceptance(8, 0.1), weight_decay=0.01, **o), "mean"),
}


def search(
    name: str, steps: int, place: Place | None = None, parts: int = 0, make: Callable[[], nn.Module] = convex
) -> Tensor:
    """The parameters after steps in a group, or alone with the shards of ``parts`` processes as closures, or in one."""
    model, (x, y) = make(), batch()
    maker, reduction = (SEARCHES | MORE)[name]
    options = {} if place is None else {"process_group": place.group, "check_every": 1}
    opt, loss = maker(model.parameters(), **options), losses(model, reduction)
    shards = cuts(parts or 1)
    for _ in range(steps):
        if place is not None:
            start, stop = cuts(place.size)[place.rank]
            opt.step(loss, x[start:stop], y[start:stop])
        elif parts:
            opt.step(
                [lambda a=a, b=b: loss(x[a:b], y[a:b]) for a, b in shards],
                weight=[stop - start for start, stop in shards],
            )
        else:
            opt.step(loss, x, y)
    return flat(model)


def placed(place: Place | None, rows: int) -> tuple[dict[str, Any], tuple[int, int]]:
    """Options of processes, and the part of the batch; with ``rows`` those of a mesh."""
    if place is None:
        return {}, (0, COUNT)
    group, part = meshed(place, rows) if rows else (place.group, cuts(place.size)[place.rank])
    return {"process_group": group, "check_every": 1}, part


def horizon(steps: int, place: Place | None = None, make: Callable[[], nn.Module] = network, rows: int = 0) -> Tensor:
    """The same of HorizonAdam."""
    model, (x, y) = make(), batch()
    options, (start, stop) = placed(place, rows)
    opt, loss = optim.HorizonAdam(model.parameters(), **options), losses(model, "none")
    for _ in range(steps):
        opt.step(loss, x[start:stop], y[start:stop])
    return flat(model)


def changing_horizon(place: Place | None = None) -> Tensor:
    """The same with all options, a layer that comes later, and one that is frozen for a while."""
    model, (x, y) = network(), batch()
    options: dict[str, Any] = {} if place is None else {"process_group": place.group, "check_every": 1}
    first, middle, last = (list(model[number].parameters()) for number in (0, 2, 4))
    groups = [{"params": first}, {"params": last, "rate": 1e-3, "betas": (0.8, 0.99)}]
    options |= {"clip": 0.5, "every": 2, "weight_decay": 0.01}
    opt, loss = optim.HorizonAdam(groups, **options), losses(model, "none")
    start, stop = (0, COUNT) if place is None else cuts(place.size)[place.rank]
    for parameter in middle:
        parameter.requires_grad_(False)
    for number in range(3):
        if number == 1:
            for parameter in middle:
                parameter.requires_grad_(True)
            opt.add_param_group({"params": middle})
        for parameter in first:
            parameter.requires_grad_(number != 2)
        opt.steps(loss, torch.stack([x[start:stop]] * 3), torch.stack([y[start:stop]] * 3))
    return flat(model)


def forward(
    steps: int,
    place: Place | None = None,
    parts: int = 0,
    make: Callable[[], nn.Module] = network,
    rows: int = 0,
    **options: Any,
) -> Tensor:
    """The parameters, and the last loss, after steps along forward gradients."""
    model, (x, y) = make(), batch()
    group, (start, stop) = placed(place, rows)
    options |= group
    estimate = jp.ForwardGradient(model.parameters(), options.pop("samples", None), **options)
    opt, loss = torch.optim.SGD(model.parameters(), 0.05), losses(model, "none")
    found = torch.zeros(())
    for step in range(steps):
        opt.zero_grad()
        if parts:
            for first, last in cuts(parts):
                estimate.step = step
                estimate(loss, x[first:last], y[first:last], offset=first, total=COUNT)
        else:
            found = estimate(loss, x[start:stop], y[start:stop])
        opt.step()
    return torch.cat([flat(model), found.reshape(1) if not parts else torch.zeros(0, dtype=F64)])


# -- one launch -------------------------------------------------------------------------------------------------------


def message(work: Callable[[], Any]) -> str:
    """What is raised, in words without numbers of ports."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {re.sub(r'127[.0-9]*:[0-9]+', 'PORT', str(error))}"
    return "nothing was raised"


# Of a group: what has to be waited for on a machine that is busy with other tests is seconds, and a compiler's minutes
PATIENCE = timedelta(seconds=600)


def torchrun(size: int, *more: str) -> list[str]:
    """The launcher, with a port and a store of its own, whatever else is launched at the same time."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *more]


def _work(rank: int, size: int, folder: str, jobs: Callable[[], dict[str, Callable[[Place], Any]]]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size, timeout=PATIENCE
    )
    place = Place(rank, size, distributed.group.WORLD)
    torch.save({name: job(place) for name, job in jobs().items()}, f"{folder}/{rank}.pt")
    os._exit(0)  # a process of which another one died cannot take leave of the group


def launch(folder: Path, size: int, jobs: Callable[[], dict[str, Callable[[Place], Any]]]) -> list[dict[str, Any]]:
    """What the jobs gave, by rank. Tests that run beside each other share a launch: the first one makes it."""
    done = folder / "done"
    try:
        folder.mkdir()
    except FileExistsError:
        while not done.exists():
            time.sleep(0.1)
    else:
        try:
            multiprocessing.spawn(_work, (size, str(folder), jobs), size)
        finally:
            done.touch()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


# -- one process that takes the shards in turn ------------------------------------------------------------------------


class Turns(Processes):
    """The place of a shard in one process, where shards are computed one after the other up to each exchange.

    Each has a thread, of which one runs at a time; no two passes are under way beside each other.
    """

    def __init__(self, rank: int, said: list[Any], turn: threading.Lock, all_there: threading.Barrier) -> None:
        self.rank, self.size, self.device = rank, len(said), torch.device("cpu")
        self._ranks = list(range(self.size))
        self._said, self._turn, self._all_there = said, turn, all_there

    def _heard(self, mine: Any) -> list[Any]:
        self._said[self.rank] = mine
        self._turn.release()
        self._all_there.wait(60)
        heard = list(self._said)
        self._all_there.wait(60)
        self._turn.acquire()
        return heard

    def _all_gather(self, record: Tensor, what: str) -> list[Tensor]:
        return self._heard(record)

    def _sum(self, flat: Tensor, what: str) -> Tensor:
        first, *others = self._heard(flat)
        total: Tensor = first.clone()
        for other in others:
            total += other
        return total

    def led(self, compute: Callable[[], Tensor], length: int, what: str) -> Tensor:
        first: Tensor = self._heard(compute() if self.rank == 0 else None)[0]
        return first


def horizon_in_turns(steps: int, size: int) -> list[Tensor]:
    """The parameters after steps of HorizonAdam whose shards are taken in turn by one process, by shard."""
    said, turn, all_there = [None] * size, threading.Lock(), threading.Barrier(size)
    found: list[Any] = [None] * size

    def one(rank: int) -> None:
        with turn:
            model, (x, y) = network(), batch()
            opt, loss = optim.HorizonAdam(model.parameters()), losses(model, "none")
            place = Turns(rank, said, turn, all_there)
            opt._crew.processes = opt.estimate.crew.processes = place
            start, stop = cuts(size)[rank]
            for _ in range(steps):
                opt.step(loss, x[start:stop], y[start:stop])
            found[rank] = flat(model)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
