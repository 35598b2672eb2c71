"""What is done in one launch of processes, by name: the tests of ``parallel`` look at what came of it."""

from __future__ import annotations

import copy
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import jetplane as jp
from jetplane import optim
from jetplane.ad import _torch
from jetplane.directions import Gaussian, Grown
from jetplane.journal import Journal, SharedJournal, opened, replay, verify
from jetplane.parallel import Quorum, processes
from jetplane.parallel.processes import Processes
from jetplane.solvers import Step
from many_processes import (
    MORE,
    SEARCHES,
    Place,
    Recurrent,
    batch,
    changing_horizon,
    columns,
    convex,
    cuts,
    flat,
    forward,
    horizon,
    losses,
    meshed,
    message,
    network,
    normed,
    search,
    seeded,
)
from tracing import trace_only

Job = Callable[[Place], Any]


def shard(place: Place) -> tuple[Tensor, Tensor]:
    x, y = batch()
    start, stop = cuts(place.size)[place.rank]
    return x[start:stop], y[start:stop]


def stepped(place: Place, model: nn.Module | None = None, steps: int = 1, **options: Any) -> Any:
    """A search that has taken some steps."""
    model = convex() if model is None else model
    opt = optim.FoMoHKD(model.parameters(), 0.3, options.pop("k", 2), process_group=place.group, **options)
    for _ in range(steps):
        opt.step(losses(model, "mean"), *shard(place))
    return opt


def _short(opt: Any) -> Callable[[], Tensor]:
    """Any loss of a search's parameters."""
    return lambda: sum(p.square().sum() for p in opt.param_groups[0]["params"])


# -- processes that differ ------------------------------------------------------------------------------------------


def other_values(place: Place) -> str:
    model = convex()
    with torch.no_grad():
        model.bias[1] += place.rank * 1e-16
    return message(lambda: stepped(place, model))


def other_dtype(place: Place) -> str:
    model = convex() if place.rank == 0 else convex().float()
    x, y = shard(place)
    opt = optim.FGD(model.parameters(), process_group=place.group)
    return message(lambda: opt.step(lambda: F.cross_entropy(model(x.to(model.weight.dtype)), y), weight=1))


def other_version(place: Place) -> str:
    before, jp.__version__ = jp.__version__, f"9.{place.rank}"
    try:
        return message(lambda: stepped(place))
    finally:
        jp.__version__ = before


def other_rate(place: Place) -> str:
    opt = stepped(place)
    opt.param_groups[0]["lr"] = 0.3 + place.rank
    return message(lambda: opt.step(_short(opt), weight=1))


def drifted(place: Place) -> str:
    model = convex()
    opt = stepped(place, model, 4, check_every=4)
    if place.rank == 1:
        with torch.no_grad():
            model.bias[0] += 1e-12
    return message(lambda: [opt.step(losses(model, "mean"), *shard(place)) for _ in range(4)])


def other_exchanges(place: Place) -> list[str]:
    """Processes that would exchange something else, or at other steps."""
    model, group = convex(), Quorum(place.group, 1, 1.0) if place.rank else place.group
    opt = optim.FoMoHKD(model.parameters(), 0.3, 2, process_group=group)
    said = message(lambda: opt.step(losses(model, "mean"), *shard(place)))
    return [message(lambda: stepped(place, check_every=1 + place.rank)), said]


def copied(place: Place) -> list[bool]:
    """Copies of model and optimizer stay in the group, the mesh or the quorum, and take the same step."""
    found = []
    whole = batch()
    for group in (place.group, meshed(place, 1)[0], Quorum(place.group, 2, 5.0)):
        given = whole if isinstance(group, DeviceMesh) else shard(place)
        kinds: list[Callable[..., Any]] = [lambda p, group=group: optim.FoMoHKD(p, 0.3, 2, process_group=group)]
        if not isinstance(group, Quorum):
            kinds.append(lambda p, group=group: optim.HorizonAdam(p, process_group=group))
        for kind in kinds:
            model = network()
            pair = [(model, kind(model.parameters()))]
            for one in (0, 1):
                for model, opt in pair:
                    opt.step(losses(model, "none" if isinstance(opt, optim.HorizonAdam) else "mean"), *given)
                if one == 0:
                    pair.append(copy.deepcopy(pair[0]))
            found.append(torch.equal(flat(pair[0][0]), flat(pair[1][0])))
    return found


def other_horizon(place: Place) -> str:
    model = network()
    opt = optim.HorizonAdam(model.parameters(), seed=place.rank, process_group=place.group)
    return message(lambda: opt.step(losses(model, "none"), *shard(place)))


def other_program(place: Place) -> str:
    model = network()
    estimate = jp.ForwardGradient(model.parameters(), process_group=place.group)
    return message(
        lambda: estimate(
            lambda x, y: F.cross_entropy((model(x).sin() if place.rank else model(x)), y, reduction="none"),
            *shard(place),
        )
    )


# -- faults -----------------------------------------------------------------------------------------------------------


def raising(place: Place) -> list[str]:
    """One process raises, in a plane, at the end of a step, in a backward pass, in a forward gradient, on a path."""

    def broken(at: tuple[int, int], reduction: str) -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], None]]:
        step, runs = [0], [0]

        def loss(x: Tensor, y: Tensor) -> Tensor:
            runs[0] += 1
            if place.rank == 1 and (step[0], runs[0]) > at:
                raise KeyError("a broken disk")
            return losses(model, reduction)(x, y)

        def ended() -> None:
            step[0], runs[0] = step[0] + 1, 0

        return loss, ended

    found = []
    for make, at, reduction in (  # after which step, and how many runs of the next one
        (lambda p: optim.FoMoHKD(p, 0.3, 2, process_group=place.group), (0, 0), "mean"),
        (lambda p: optim.GaussNewtonSearch(p, k=4, process_group=place.group), (0, 1), "mean"),
        (lambda p: optim.FoMoHBP(p, 0.3, process_group=place.group), (0, 0), "mean"),
        (lambda p: optim.HorizonAdam(p, process_group=place.group), (0, 0), "none"),
        (lambda p: optim.HorizonAdam(p, process_group=place.group, every=1), (1, 0), "none"),
    ):
        model = network()
        opt, (loss, ended) = make(model.parameters()), broken(at, reduction)

        def steps(opt: Any = opt, loss: Any = loss, ended: Any = ended) -> None:
            for _ in range(20):
                opt.step(loss, *shard(place))
                ended()

        found.append(message(steps))
    return found


@dataclass(frozen=True)
class Broken:
    """A solver that fails: the first process alone asks it."""

    descends: ClassVar[bool] = True

    def __call__(self, model: jp.Quadratic) -> Step:
        raise ZeroDivisionError("a broken solver")


def leading(place: Place) -> str:
    return message(lambda: stepped(place, solver=Broken()))


def nonfinite(place: Place) -> list[Any]:
    """One process has a loss that is not a number: what is logged, what is raised, and that nobody moved."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("jetplane").addHandler(handler)
    try:
        model = convex()
        opt = optim.FoMoHKD(model.parameters(), 0.3, 2, process_group=place.group, patience=2)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return losses(model, "mean")(x, y) * (float("nan") if place.rank == 1 else 1.0)

        opt.step(loss, *shard(place))
        status = opt.report.status.name
        stalled = message(lambda: opt.step(loss, *shard(place)))
        still = flat(model)
        other = network()
        adam = optim.HorizonAdam(other.parameters(), process_group=place.group)

        def many(x: Tensor, y: Tensor) -> Tensor:
            return losses(other, "none")(x, y) * (float("inf") if place.rank == 0 else 1.0)

        adam.step(many, *shard(place))
        return [status, stalled, still, adam.report.status.name, flat(other), heard]
    finally:
        logging.getLogger("jetplane").removeHandler(handler)


def hanging(place: Place) -> str:
    """One process does not come."""
    group = distributed.new_group(timeout=timedelta(seconds=5))
    opt = stepped(Place(place.rank, place.size, group))
    if place.rank == 1:
        time.sleep(8)
        return "slept"
    return message(lambda: opt.step(_short(opt), weight=1))


# -- arguments ------------------------------------------------------------------------------------------


def let_go(place: Place) -> list[int]:
    """What gloo's thread still holds behind an exchange is kept, and is let go of at the end of the process."""
    members, kept = Processes(place.group), 0
    for number in range(50):
        members.gather(torch.tensor([float(number)], dtype=torch.float64), "an exchange")
        kept += bool(processes._HELD)
    processes._settle()
    return [kept, len(processes._HELD)]


def arguments(place: Place) -> dict[str, str]:
    model = convex()
    loss = losses(model, "mean")
    params, group = list(model.parameters()), place.group
    opt = stepped(place, model)
    x, y = shard(place)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "directions"))
    estimate = jp.ForwardGradient(params, process_group=group)
    return {
        "no batch": message(lambda: opt.step(lambda: loss(x, y))),
        "a list": message(lambda: opt.step([lambda: loss(x, y)] * 2)),
        "weights": message(lambda: opt.step([lambda: loss(x, y)] * 2, weight=[1.0])),
        "text": message(lambda: opt.step(loss, x, y, weight="many")),
        "negative": message(lambda: opt.step(loss, x, y, weight=-1)),
        "nobody": message(lambda: opt.step(loss, x, y, weight=0)),
        "compile": message(lambda: optim.FGD(params, compile=True, process_group=mesh)),
        "capturable": message(lambda: jp.ForwardGradient(params, capturable=True, process_group=group)),
        "compiled estimate": message(lambda: jp.ForwardGradient(params, compile=True, process_group=mesh)),
        "compiled adam": message(lambda: optim.HorizonAdam(params, compile=True, process_group=mesh)),
        "several closures": message(
            lambda: optim.HorizonAdam(params, process_group=group).step([lambda: losses(model, "none")(x, y)] * 2)
        ),
        "another size": message(lambda: resized(place)),
        "pickle": message(lambda: Processes(group).__reduce__()),
        "total": message(lambda: estimate(losses(model, "none"), x, y, total=12)),
        "offset": message(lambda: estimate(losses(model, "none"), x, y, offset=11)),
        "not a member": message(lambda: outsider(place)),
    }


def resized(place: Place) -> None:
    """A function without arguments, whose batch is another one at the second call."""
    model, (x, y) = network(), shard(place)
    estimate = jp.ForwardGradient(model.parameters(), process_group=place.group)
    for size in (4, 3):
        estimate(lambda size=size: losses(model, "none")(x[:size], y[:size]))


def outsider(place: Place) -> None:
    distributed_group = distributed.new_group([0])
    if place.rank == 1:
        optim.FGD(convex().parameters(), process_group=distributed_group)
    else:
        raise ValueError("this process is a member")


def alone(place: Place) -> list[str]:
    """Without a group: what is said, how often."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = convex()
        opt = optim.FGD(model.parameters())
        for _ in range(3):
            opt.step(losses(model, "mean"), *shard(place))
        network_ = network()
        adam = optim.HorizonAdam(network_.parameters())
        for _ in range(2):
            adam.step(losses(network_, "none"), *shard(place))
    return [str(one.message) for one in said]


def journaled(place: Place) -> list[Any]:
    """The journal that each process keeps: what a replay finds, and whether it ends with the parameters."""
    model = seeded(lambda: nn.Linear(5, 3))
    idle = nn.Parameter(torch.ones(2, dtype=torch.float64))  # which the second process alone reads
    model.register_parameter("idle", idle)
    directions = Grown(Gaussian, 2, 4, 2, 2.0)
    opt = optim.FoMoHKD(model.parameters(), 0.3, directions=directions, clip=0.3, process_group=place.group)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(F.linear(x, model.weight, model.bias), y)
        return found + place.rank * idle.square().sum()

    with tempfile.TemporaryDirectory() as folder:
        with Journal(folder, opt, model=model, digest_every=1):
            for _ in range(6):
                opt.step(loss, *shard(place))
        found = replay(folder)
        same = [torch.equal(found[name], tensor) for name, tensor in model.state_dict().items()]
        return [verify(folder)[0], same]


def shared_journal(place: Place) -> list[Any]:
    """A journal that both processes share, gone on with by processes that hold other numbers; and a refused one."""
    (folder,) = Processes(place.group).texts(tempfile.mkdtemp() if place.rank == 0 else "", "a test")[:1]

    def run(steps: int, start: float) -> tuple[Tensor, Any, int]:
        model = seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
        with torch.no_grad():
            model[0].bias += start
        directions = Grown(Gaussian, 2, 4, 2, 2.0)
        opt = optim.FoMoHKD(model.parameters(), 0.3, directions=directions, clip=0.3, process_group=place.group)
        with SharedJournal(f"{folder}/journal", opt, model=model, snapshot_every=2) as journal:
            found = journal.place, journal.step
            for number in range(journal.step, steps):
                journal.place = {"step": number}
                opt.step(losses(model, "mean"), *shard(place))
        return torch.cat([flat(model), *(b.double().flatten() for b in model.buffers())]), *found

    run(3, 0.0)
    went_on = run(6, 1.0 + place.rank)
    model = convex()
    opt = optim.FoMoHKD(model.parameters(), 0.3, process_group=place.group)
    refused = message(lambda: SharedJournal(f"{folder}/journal", opt, model=model))
    return [went_on, refused.split(";")[0].replace(folder, "FOLDER"), list(replay(f"{folder}/journal").values())]


def absent(place: Place) -> list[Any]:
    """The second process is slow in one of eight steps, and left out: parameters, who was left out, steps computed."""
    model, slow = convex(), {2: 0.8}
    quorum = Quorum(place.group, least=1, wait=0.3, lost=20.0)
    opt = optim.FoMoHKD(model.parameters(), 0.3, 2, process_group=quorum, check_every=1, clip=1.0)
    calls: list[int] = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        calls.append(opt.param_groups[0]["step"])
        if place.rank == 1:
            time.sleep(slow.get(calls[-1], 0.0))
        return losses(model, "mean")(x, y)

    with tempfile.TemporaryDirectory() as folder:
        with Journal(folder, opt, model=model):
            for step in range(8):
                time.sleep(1.5 * (place.rank == 0 and step == 4))  # so that the other one can catch up
                opt.step(loss, *shard(place))
        run = opened(folder)
        left_out = [list(record.absent) for record in run.records(run.first, run.last)]
    distributed.barrier()
    return [flat(model), left_out, calls]


def _late(place: Place, steps: int) -> str:
    """What the second process says of a step that the first one has not taken, or has left so many steps behind."""
    model = convex()
    quorum = Quorum(place.group, least=1, wait=0.001, lost=1.0)
    opt = optim.FGD(model.parameters(), 0.01, process_group=quorum, check_every=None)
    loss, (x, y) = losses(model, "mean"), shard(place)
    for _ in range(1 + steps * (place.rank == 0)):
        opt.step(loss, x, y)
    distributed.barrier()
    said = message(lambda: opt.step(loss, x, y)) if place.rank else ""
    distributed.barrier()
    return said


def quorum_refusals(place: Place) -> dict[str, str]:
    """What there is no quorum for; processes that differ, or fail, or do not come."""
    few = Quorum(place.group, least=2, wait=0.2, lost=1.0)
    params = list(convex().parameters())
    batches = shard(place)

    def stepping(broken: bool = False, **options: Any) -> str:
        model = convex()
        opt = optim.FoMoHKD(model.parameters(), 0.3, 2, process_group=few, **options)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            if broken and place.rank == 1:
                raise KeyError("a broken disk")
            return losses(model, "mean")(x, y)

        return message(lambda: opt.step(loss, *batches))

    model = convex()
    drifting = optim.FoMoHKD(model.parameters(), 0.3, 2, process_group=few, check_every=1)
    drifting.step(losses(model, "mean"), *batches)
    if place.rank == 1:
        with torch.no_grad():
            model.bias[0] += 1e-12
    found = {
        "HorizonAdam": message(lambda: optim.HorizonAdam(params, process_group=few)),
        "least": message(lambda: optim.FGD(params, process_group=Quorum(place.group, 3, 1.0))),
        "no group": message(lambda: optim.FGD(params, process_group=Quorum(None, 1, 1.0))),
        "acceptance": stepping(accept=optim.Acceptance(0)),
        "solver": stepping(solver=Broken()),
        "nobody": message(lambda: optim.FGD(params, process_group=few).step(lambda: params[0].sum(), weight=0)),
        "drifted": message(lambda: [drifting.step(losses(model, "mean"), *batches) for _ in range(2)]),
        "raising": stepping(broken=True),
    }
    distributed.barrier()
    for name, steps in (("leader gone", 0), ("behind", 1002)):
        found[name] = _late(place, steps)
    return found


def compiled(place: Place) -> list[Any]:
    """Compiled passes in a group, beside uncompiled ones, with a journal and what a loss has beside it."""
    found: list[Any] = []
    for compile in (False, True):
        model = convex()
        # the solver asks the host, and the acceptance halves: neither is compiled
        options = {"solver": jp.solvers.SaddleFree(), "accept": optim.Acceptance(2), "compile": compile}
        opt = optim.FoMoHKD(model.parameters(), 0.3, 2, process_group=place.group, check_every=1, **options)

        def loss(x: Tensor, y: Tensor, model: nn.Module = model) -> tuple[Tensor, Tensor]:
            logits = model(x)
            penalty = 0.05 * sum(p.square().sum() for p in model.parameters())
            return F.cross_entropy(logits, y) + penalty, logits.argmax(1)

        with tempfile.TemporaryDirectory() as folder:
            with Journal(folder, opt, model=model, digest_every=1):
                for _ in range(3):
                    opt.step(loss, *shard(place), has_aux=True)
            assert verify(folder).digests == 3
        found += [flat(model), opt.report.aux, opt._swept is not None]
    return found


def compiled_estimates(place: Place, by_compiler: bool = False) -> dict[str, list[Tensor]]:
    """Compiled forward gradients and steps of HorizonAdam in a group, beside uncompiled ones; one batch is smaller."""
    kept = _torch.compiled
    if not by_compiler:
        _torch.compiled = trace_only  # type: ignore[assignment]
    try:
        return {name: [_estimated(place, name, flag) for flag in (False, True)] for name in ESTIMATED}
    finally:
        _torch.compiled = kept  # type: ignore[assignment]


ESTIMATED: dict[str, Callable[..., Any]] = {
    "gradient": lambda p, **o: jp.ForwardGradient(p, **o),
    "without control": lambda p, **o: jp.ForwardGradient(p, 3, control=False, **o),
    "HorizonAdam": lambda p, **o: optim.HorizonAdam(p, **o),
    "clipped": lambda p, **o: optim.HorizonAdam(p, clip=0.3, every=2, weight_decay=0.1, **o),
}


def _estimated(place: Place, name: str, compile: bool) -> Tensor:
    model, (x, y) = network(), shard(place)
    opt = ESTIMATED[name](model.parameters(), compile=compile, process_group=place.group, check_every=1)
    is_step, loss, found = isinstance(opt, optim.HorizonAdam), losses(model, "none"), []
    adam = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(6):
        given = (x[1:], y[1:]) if step == 3 and place.rank == 1 else (x, y)
        if is_step:
            found.append(opt.step(loss, *given))
            continue
        adam.zero_grad()
        found.append(opt(loss, *given))
        adam.step()
    reports = opt.steps(loss, torch.stack([x] * 2), torch.stack([y] * 2))
    found += list(reports.loss if is_step else reports)
    assert (opt._compiled is not None) == compile
    grads = [] if is_step else [p.grad.flatten() for p in model.parameters()]
    return torch.cat([flat(model), torch.stack(found), *grads])


def compiled_faults(place: Place) -> dict[str, str]:
    """A process whose losses are not finite, one that raises, and one whose batch is no argument and changes."""
    kept = _torch.compiled
    _torch.compiled = trace_only  # type: ignore[assignment]
    try:
        found = {}
        for what in ("not finite", "raising", "another size"):
            model, (x, y) = network(), shard(place)
            opt = optim.HorizonAdam(model.parameters(), compile=True, process_group=place.group)
            factor, before = torch.ones((), dtype=torch.float64), losses(model, "none")
            opt.step(lambda x, y: before(x, y) * factor, x, y)  # noqa: B023
            start = flat(model)
            if what == "not finite" and place.rank == 1:
                factor.fill_(torch.nan)
            if what == "raising" and place.rank == 1:
                x = x[:, :2]
            if what == "another size":
                sizes = (4, 3)
                opt = optim.HorizonAdam(model.parameters(), compile=True, process_group=place.group)

                def loss(size: int) -> Tensor:
                    return before(x[:size], y[:size])  # noqa: B023

                said = message(lambda: [opt.step(partial(loss, size)) for size in sizes])  # noqa: B023
            else:
                said = message(lambda: opt.step(lambda x, y: before(x, y) * factor, x, y))  # noqa: B023
            found[what] = f"{said.partition(';')[0]}, {'still' if torch.equal(start, flat(model)) else 'moved'}"
        return found
    finally:
        _torch.compiled = kept  # type: ignore[assignment]


# -- what else works ------------------------------------------------------------------------------------


def wrapped(place: Place) -> dict[str, Tensor]:
    """Modules in DistributedDataParallel."""
    found = {}
    model = convex()
    ddp = DistributedDataParallel(model, process_group=place.group)
    opt = optim.FoMoHKD(ddp.parameters(), 0.3, 2, process_group=place.group)
    for _ in range(3):
        opt.step(
            lambda x, y: F.cross_entropy(ddp(x), y) + 0.05 * sum(p.square().sum() for p in model.parameters()),
            *shard(place),
        )
    found["FoMoHKD"] = flat(model)
    other = network()
    both = DistributedDataParallel(other, process_group=place.group)
    adam = optim.HorizonAdam(both.parameters(), process_group=place.group)
    for _ in range(5):
        adam.step(lambda x, y: F.cross_entropy(both(x), y, reduction="none"), *shard(place))
    found["HorizonAdam"] = flat(other)
    return found


def unused(place: Place) -> Tensor:
    """A parameter that only one process uses moves on both."""
    one, other = seeded(lambda: nn.Linear(5, 3)), seeded(lambda: nn.Linear(3, 3))
    params = [*one.parameters(), *other.parameters()]
    opt = optim.FoMoHKD(params, 0.1, 2, process_group=place.group, check_every=1)
    for _ in range(3):
        opt.step(lambda x, y: F.cross_entropy(other(one(x)) if place.rank else one(x), y), *shard(place))
    return torch.cat([p.detach().flatten() for p in params])


def empty(place: Place) -> Tensor:
    """A process whose shard is empty counts nothing, whatever its loss is."""
    model, (x, y) = convex(), batch()
    opt = optim.FoMoHKD(model.parameters(), 0.3, 2, process_group=place.group, check_every=1)
    mine = (x, y) if place.rank == 0 else (x[:0], y[:0])
    for _ in range(3):
        opt.step(losses(model, "mean"), *mine)
    return flat(model)


def refused(place: Place) -> dict[str, str]:
    """Sharded parameters."""
    from torch.distributed.fsdp import fully_shard

    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
    fully_shard(model)
    x = torch.ones(2, 4, dtype=torch.float64)
    return {
        "quadratic": message(
            lambda: jp.quadratic(lambda w: w.sum() + x.sum(), next(model.parameters()), next(model.parameters()))
        ),
    }


SHARING = ("FGD", "FoMoHKD", "Newton", "the empirical Fisher", "all options")


def shared(place: Place) -> dict[str, Any]:
    """Directions that two processes share; and what they refuse."""
    found: dict[str, Any] = {name: columns(name, 3, place, 1) for name in SHARING}
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "directions"))
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    model, (x, y) = convex(), batch()
    params, loss = list(model.parameters()), losses(model, "mean")
    each = losses(model, "none")
    found["other batch"] = message(lambda: optim.FoMoHKD(params, 0.3, process_group=mesh).step(loss, x + place.rank, y))
    found["other chunks"] = message(
        lambda: optim.FoMoHKD(params, 0.3, 4, chunk_size=2 - place.rank, process_group=mesh).step(loss, x, y)
    )
    found["late"] = message(lambda: optim.GaussNewtonSearch(params, k=4, process_group=mesh).step(each, x, y))
    found["K"] = message(lambda: optim.FoMoH(params, process_group=mesh).step(loss, x, y))
    found["names"] = message(lambda: optim.FoMoH(params, process_group=other))
    few = DeviceMesh("cpu", [[0]], mesh_dim_names=("data", "directions"))
    found["few"] = message(lambda: optim.FoMoH(params, process_group=few))
    found["other samples"] = message(
        lambda: optim.HorizonAdam(params, process_group=mesh).step(each, x + place.rank, y)
    )
    deep = network()
    noisy, hidden = losses(deep, "none"), list(deep.parameters())
    found["tangents"] = message(lambda: jp.ForwardGradient(hidden, 1, process_group=mesh)(noisy, x, y))
    short = x[: 12 - place.rank], y[: 12 - place.rank]
    found["other count"] = message(lambda: jp.ForwardGradient(hidden, 4, process_group=mesh)(noisy, *short))

    def failing(x: Tensor, y: Tensor) -> Tensor:
        if place.rank == 1:
            raise KeyError("a broken disk")
        return noisy(x, y)

    found["failing"] = message(lambda: optim.HorizonAdam(hidden, process_group=mesh).step(failing, x, y))

    def broken(x: Tensor, y: Tensor) -> Tensor:
        if place.rank == 1:
            raise KeyError("a broken disk")
        return loss(x, y)

    found["raising"] = message(lambda: optim.FoMoHKD(params, 0.3, process_group=mesh).step(broken, x, y))
    found["still"] = flat(model)
    return found


TANGENTS: dict[str, Callable[..., Tensor]] = {
    "forward": partial(forward, 30),
    "forward in chunks": partial(forward, 3, samples=9, chunk_size=2),
    "forward without control": partial(forward, 3, control=False),
    "forward, tokens first": partial(forward, 3, make=lambda: seeded(Recurrent)),
    "forward, batch norms": partial(forward, 3, make=lambda: normed(3)),
    "forward, weights": partial(forward, 3, estimator="weight", samples=5),
    "HorizonAdam": partial(horizon, 12),
}


def tangents(rows: int, place: Place) -> dict[str, Tensor]:
    """Tangents that processes share, of each of some parts of the batch."""
    return {name: job(place=place, rows=rows) for name, job in TANGENTS.items() if rows == 1 or "norm" not in name}


def failing_in_a_mesh(place: Place) -> list[str]:
    """The last process fails, before its samples are counted and after: the others hear of it by two groups."""
    mesh, (start, stop) = meshed(place, 2)
    x, y = (part[start:stop] for part in batch())
    model = network()
    found = []
    for bad in (1, 2):
        estimate = jp.ForwardGradient(model.parameters(), 4, process_group=mesh)
        noisy, calls = losses(model, "none"), []
        estimate(noisy, x, y)  # its program is known then, so that the next call runs it twice

        def failing(x: Tensor, y: Tensor, bad: int = bad, calls: list[int] = calls, noisy: Any = noisy) -> Tensor:
            calls.append(len(calls))
            if place.rank == place.size - 1 and len(calls) == bad:
                raise KeyError("a broken disk")
            return noisy(x, y)

        found.append(message(lambda e=estimate, f=failing: e(f, x, y)))
    return found


def sums(place: Place) -> list[Tensor]:
    """Sums in the order of ranks, of tensors of several kinds and sizes, the empty one among them."""
    whole = [torch.linspace(-1, 1, n, dtype=dtype) / 3 + place.rank * 0.1 for n, dtype in SUMMED]
    return Processes(place.group).sums(whole, "a test")


SUMMED = [(7, torch.float32), (0, torch.float64), (1, torch.float64), (1000, torch.float64), (3, torch.bfloat16)]


def all_jobs() -> dict[str, Job]:
    """What two processes do."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    jobs: dict[str, Job] = {}
    for name in SEARCHES | MORE:
        jobs[f"{name} 1"] = partial(_search, name, 1)
        jobs[f"{name} 12"] = partial(_search, name, 12)
    jobs["HorizonAdam 1"] = lambda place: horizon(1, place)
    jobs["HorizonAdam 12"] = lambda place: horizon(12, place)
    jobs["forward"] = lambda place: forward(30, place)
    jobs["forward without control"] = lambda place: forward(3, place, control=False)
    jobs["forward, tokens first"] = lambda place: forward(3, place, make=lambda: seeded(Recurrent))
    jobs["forward, batch norm"] = lambda place: forward(3, place, make=normed, control=False)
    jobs["forward, weights"] = lambda place: forward(3, place, estimator="weight", samples=4)
    jobs["seed"] = lambda place: message(lambda: stepped(place, seed=place.rank))
    jobs["K"] = lambda place: message(lambda: stepped(place, k=2 + place.rank))
    jobs["solver"] = lambda place: message(
        lambda: stepped(place, solver=jp.solvers.SaddleFree() if place.rank else jp.solvers.JitteredInverse())
    )
    jobs["shape"] = lambda place: message(lambda: stepped(place, seeded(lambda: nn.Linear(5, 3 + place.rank))))
    different = (other_values, other_dtype, other_version, other_rate, drifted, other_horizon, other_program)
    for job in (*different, other_exchanges, copied):
        jobs[job.__name__] = job  # type: ignore[assignment]
    for job in (raising, leading, nonfinite, hanging, arguments, alone, wrapped, unused, empty, refused, sums, shared):
        jobs[job.__name__] = job  # type: ignore[assignment]
    jobs["HorizonAdam, changed on its way"] = changing_horizon
    jobs["journaled"] = journaled
    jobs["tangents"] = partial(tangents, 1)
    for one in (shared_journal, absent, quorum_refusals, let_go, compiled, compiled_estimates, compiled_faults):
        jobs[one.__name__] = one  # type: ignore[assignment]
    jobs["dying"] = dying
    return jobs


def _search(name: str, steps: int, place: Place) -> Tensor:
    return search(name, steps, place)


def _both(name: str, place: Place) -> Tensor:
    return columns(name, 12, place, 2)


def dying(place: Place) -> str:
    """One process is gone: the last of the jobs."""
    group = distributed.new_group(timeout=timedelta(seconds=20))
    opt = stepped(Place(place.rank, place.size, group))
    if place.rank == 1:
        return "gone"
    return message(lambda: opt.step(_short(opt), weight=1))


def long_jobs() -> dict[str, Job]:
    """What four processes do."""
    jobs: dict[str, Job] = {name: partial(_search, name, 100) for name in SEARCHES}
    for name in SHARING:
        jobs[f"both, {name}"] = partial(_both, name)
    return {
        **jobs,
        "HorizonAdam": lambda place: horizon(100, place),
        "tangents": partial(tangents, 2),
        "failing": failing_in_a_mesh,
    }
