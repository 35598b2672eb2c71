"""What processes do with parameters that they share out: tests look at what came of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import jetplane as jp
from jetplane import optim
from jetplane.directions import Gaussian, Orthonormal, Plane, PreviousStep, Rademacher, RankOne
from jetplane.journal import Journal, SharedJournal, opened, replay, verify
from jetplane.optim.acceptance import UNRAISED
from jetplane.solvers import LevenbergMarquardt
from jetplane.testing.oracle import double_backward
from many_processes import Place, message, seeded
from tiny_llama import TinyLlama, loss, parallelised, sharded, tokens

K = 3
Make = Callable[..., Any]


def llama(kind: str, size: int) -> nn.Module:
    """The model, whole or shared out."""
    model: Any = seeded(TinyLlama)
    if kind == "fsdp":
        return sharded(model)
    if kind == "tensor parallel":
        return parallelised(model, init_device_mesh("cpu", (size,)))
    if kind == "hybrid":
        return sharded(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "parts")))
    if kind == "both":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "tensor"))
        return sharded(parallelised(model, mesh["tensor"]), mesh=mesh["data"])
    return model


def drawn(model: nn.Module) -> Any:
    leaves = list(model.parameters())
    return Gaussian(K).draw(Plane(0, 0, 0, leaves, list))


def numbers(quadratic: Any) -> dict[str, Tensor]:
    return {"loss": quadratic.loss, "slope": quadratic.slope, "curvature": quadratic.curvature}


def expected(curvature: str = "exact") -> dict[str, Tensor]:
    """Slopes and curvatures of the model in one process: exact ones by double backward."""
    model = llama("whole", 1)
    leaves, rows = list(model.parameters()), drawn(model)
    given = [rows.rows(place, leaf.detach(), 0, K) for place, leaf in enumerate(leaves)]
    if curvature == "exact":
        return numbers(double_backward(lambda: loss(model, tokens()), leaves, given))
    with jp.perturb(leaves, given, curvature=curvature) as jets:
        value = loss(model, tokens())
    return numbers(jets.quadratic(value))


def plane(kind: str, place: Place) -> dict[str, Any]:
    """The same where processes share the model out, in a first pass, and in one after FSDP has gathered."""
    model = llama(kind, place.size)
    rows, found = drawn(model), {}
    params = dict(model.named_parameters())
    for curvature in ("exact", "ggn"):
        with jp.perturb(params, rows, curvature=curvature) as jets:
            value = loss(model, tokens())
        found[curvature] = numbers(jets.quadratic(value))
    found["sharded"] = all(type(p).__name__ == "DTensor" or p.ndim == 1 for p in model.parameters())
    return found


# -- steps ------------------------------------------------------------------------------------------------------------

SEARCHES: dict[str, tuple[Make, str]] = {
    "clipped": (lambda p, **o: optim.FoMoHKD(p, 1.0, 2, clip=0.1, weight_decay=0.1, accept=UNRAISED, **o), "mean"),
    "FGD": (lambda p, **o: optim.FGD(p, 0.01, 4, **o), "mean"),
    "FoMoH": (lambda p, **o: optim.FoMoH(p, 0.5, **o), "mean"),
    "FoMoHKD": (lambda p, **o: optim.FoMoHKD(p, 0.3, 2, **o), "mean"),
    "GaussNewtonSearch": (lambda p, **o: optim.GaussNewtonSearch(p, k=8, **o), "none"),
    "rank one": (
        lambda p, **o: optim.FoMoHKD(
            p, 0.3, directions=RankOne(20), curvature="ggn", solver=LevenbergMarquardt(shrink=False), **o
        ),
        "none",
    ),
    "all options": (
        lambda p, **o: optim.FoMoHKD(
            p, 1.0, directions=[Orthonormal(2), Rademacher(2)], clip=0.3, samples=2, chunk_size=1, weight_decay=0.1, **o
        ),
        "mean",
    ),
}


def whole(model: nn.Module) -> Tensor:
    """All parameters, of which each process may have a part."""
    params = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in params])


def stepped(name: str, kind: str, place: Place, steps: int = 3) -> dict[str, Any]:
    """The parameters after steps of a model that is shared out, and of one that every process has whole."""
    maker, reduction = SEARCHES[name]
    mine = tokens()[:3] if place.rank == 0 else tokens()[3:]
    batch = mine if kind == "fsdp" else tokens()
    found: dict[str, Any] = {}
    family: Any = None
    for one in (kind, "whole"):
        model = llama(one, place.size)
        opt = maker(list(model.parameters()), process_group=place.group, check_every=1)
        if family is not None:
            opt.directions = family
        family = opt.directions
        losses = [opt.step(lambda x: loss(model, x, reduction), batch) for _ in range(steps)]  # noqa: B023
        found[one] = whole(model)
        found[f"{one}, losses"] = torch.stack(losses)
    return found


def penalised(place: Place) -> dict[str, Any]:
    """A closure that reads sharded parameters themselves, one that reads none of them, and given directions."""
    from torch.distributed.fsdp import fully_shard

    found = {}
    for kind in ("whole", "fsdp"):
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)))
        if kind == "fsdp":
            fully_shard(model)  # of the last weight (1, 3) the second process has nothing
        params = list(model.parameters())
        x = torch.sin(torch.arange(8, dtype=torch.float64)).reshape(2, 4)
        rows = [torch.cos(torch.arange(2.0 * p.numel(), dtype=torch.float64)).reshape(2, *p.shape) for p in params]
        with jp.perturb(params, rows) as jets:
            squares = [p.square().sum() for p in params]
            squares = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in squares]
            value = (model(x) ** 2).sum() * 1.5 + torch.stack(squares).sum() ** 2
        found[kind] = numbers(jets.quadratic(value))
    return found


def held(kind: str, place: Place, steps: int = 3, **options: Any) -> dict[str, Any]:
    """HorizonAdam on a model that is shared out, and on one that every process has whole; gone on with by another."""
    mine = (tokens(9) * 5 % 24).tensor_split([4] if place.size == 2 else [2, 4, 7])[place.rank]
    found: dict[str, Any] = {}
    for one in (kind, "whole"):
        losses = []
        model = llama(one, place.size)
        opt = optim.HorizonAdam(model.parameters(), process_group=place.group, check_every=1, **options)
        for step in range(steps):
            if step == 1:
                values, state = {name: p.detach().clone() for name, p in model.named_parameters()}, opt.state_dict()
                model = llama(one, place.size)
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        p.copy_(values[name])
                opt = optim.HorizonAdam(model.parameters(), process_group=place.group, check_every=1, **options)
                opt.load_state_dict(state)
            losses.append(opt.step(lambda x, model=model: loss(model, x, "none"), mine))
        with torch.no_grad():
            model(mine)  # FSDP leaves a root whole
        with opt.averaged(), torch.no_grad():
            found[f"{one}, averaged"] = loss(model, tokens())
        found[one], found[f"{one}, losses"] = whole(model), torch.stack(losses)
        found[f"{one}, numbers"] = sum(
            getattr(t, "_local_tensor", t).numel() for p in model.parameters() for t in opt.state[p].values()
        )
    return found


def estimated(kind: str, place: Place, **options: Any) -> dict[str, Any]:
    """Forward gradients of the same."""
    mine = tokens(5).tensor_split([3])[place.rank]
    found: dict[str, Any] = {}
    for one in (kind, "whole"):
        model = llama(one, place.size)
        estimate = jp.ForwardGradient(model.named_parameters(), process_group=place.group, **options)
        losses = [estimate(lambda x, model=model: loss(model, x, "none"), mine) for _ in range(3)]
        grads = [p.grad for p in model.parameters()]
        found[one] = torch.cat([g.full_tensor().flatten() if hasattr(g, "full_tensor") else g.flatten() for g in grads])
        found[f"{one}, losses"] = torch.stack(losses)
    return found


def journalled(kind: str, place: Place) -> dict[str, Any]:
    """One journal of parameters that are shared out, gone on with twice, the second time with the whole model; and one
    of each process."""
    mine = tokens(5).tensor_split([3])[place.rank] if kind == "fsdp" else tokens(5)
    base = place_of(place)
    found: dict[str, Any] = {}
    for one, until in ((kind, 3), (kind, 5), ("whole", 6)):
        model = llama(one, place.size)
        if until > 3:
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()  # what is in them is in the journal
        opt = optim.FoMoHKD(list(model.parameters()), 0.3, 2, clip=0.1, process_group=place.group)
        options = {"digest_every": 1, "snapshot_every": 2}
        with SharedJournal(f"{base}/shared", opt, model=model, **options) as journal:
            found[f"{until}, from"] = journal.step
            for _ in range(journal.step, until):
                opt.step(lambda x, model=model: loss(model, x), mine)
            journal.commit()
        torch.distributed.barrier()
        found[f"{until}, model"] = whole(model)
        found[f"{until}, replay"] = torch.cat([t.flatten() for t in replay(f"{base}/shared").values()])
        torch.distributed.barrier()
    checked = verify(f"{base}/shared")
    found["checked"] = [checked.steps, checked.digests, checked.snapshots]
    own, model = f"{base}/{place.rank}", llama(kind, place.size)
    opt = optim.FoMoHKD(list(model.parameters()), 0.3, 2, clip=0.1, process_group=place.group)
    with Journal(own, opt, model=model, digest_every=2):
        for _ in range(3):
            opt.step(lambda x: loss(model, x), mine)
    found["own"] = torch.equal(torch.cat([t.flatten() for t in replay(own).values()]), whole(model))
    found["own, steps"] = opened(own).last
    return found


def place_of(place: Place) -> str:
    """A folder that all processes know."""
    said = [tempfile.mkdtemp() if place.rank == 0 else ""]
    torch.distributed.broadcast_object_list(said, src=0)
    return str(said[0])


# -- derivatives along inputs -----------------------------------------------------------------------------------------


class Flow(nn.Module):
    """A velocity of places z at times t."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 8), nn.SiLU(), nn.Linear(8, 4)) for _ in range(2))

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        for block in self.blocks:
            z = z + block(torch.cat([z, t], -1))
        return z


def flowing(kind: str, place: Place) -> dict[str, Any]:
    """A step of MeanFlow: the derivative of the output along the path of its inputs is a part of the target."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = seeded(Flow)
    short = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if kind == "short" else MixedPrecisionPolicy()
    wrap = replicate if kind == "replicate" else fully_shard
    if kind != "whole":
        for block in model.blocks:
            wrap(block, mp_policy=short)
        wrap(model, mp_policy=short)
    z = torch.sin(torch.arange(12, dtype=torch.float64) + place.rank).reshape(3, 4)
    t, v = torch.linspace(0, 1, 3, dtype=torch.float64).unsqueeze(1), torch.cos(z)
    u, along = jp.jvp(lambda z, t: model(z, t), (z, t), (v, torch.ones_like(t)))
    found: dict[str, Any] = {"u": u.detach(), "along": along.detach()}
    if kind != "short":
        loss = (u - (v - t * along).detach()).square().mean()
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        for grad in grads if kind == "whole" else ():
            torch.distributed.all_reduce(grad)
            grad /= place.size
        grads = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
        found["gradient"] = torch.cat([grad.flatten() for grad in grads])
    return found


# -- what is refused --------------------------------------------------------------------------------------------------


def refusals(place: Place) -> dict[str, str]:
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    model, group = llama("fsdp", place.size), place.group
    params = list(model.parameters())
    mesh = init_device_mesh("cpu", (1, place.size), mesh_dim_names=("data", "directions"))
    one = init_device_mesh("cpu", (place.size,))
    whole = torch.ones(4, 2, dtype=torch.float64)
    partial = DTensor.from_local(whole, one, [Partial()])
    spread = distribute_tensor(whole, one, [Shard(0)])
    uneven = DTensor.from_local(whole[: 1 + 2 * place.rank], one, [Shard(0)], shape=(4, 2), stride=(2, 1))

    def part() -> None:
        with jp.perturb([spread], torch.ones(1, 1, 4, 2, dtype=torch.float64)) as jets:
            value = spread.square()
        jets.of(value)

    return {
        "alone": message(lambda: optim.FGD(params, 0.1).step(lambda x: loss(model, x), tokens())),
        "mesh": message(lambda: optim.FoMoHKD(params, 0.1, process_group=mesh)),
        "gradient": message(lambda: optim.FoMoHBP(params, 0.1, process_group=group)),
        "memory": message(
            lambda: optim.FoMoHKD(params, 0.1, directions=[PreviousStep(), Gaussian(1)], process_group=group)
        ),
        "HorizonAdam alone": message(lambda: optim.HorizonAdam(params)),
        "ForwardGradient alone": message(lambda: jp.ForwardGradient(params)),
        "shared tangents": message(lambda: jp.ForwardGradient(params, process_group=mesh)),
        "some processes": message(lambda: some_processes(params)),
        "not managed": message(lambda: optim.HorizonAdam([spread.requires_grad_()], process_group=group)),
        "inputs cut": message(lambda: inputs_cut(group)),
        "inputs cut, own axes": message(lambda: inputs_cut(group, rotate=False)),
        "its part": message(lambda: reading_parts(group)),
        "quadratic": message(lambda: jp.quadratic(lambda w: w.sum(), spread, torch.ones(1, 4, 2))),
        "partial": message(lambda: jp.perturb([partial], Gaussian(1))),
        "uneven": message(lambda: jp.perturb([uneven], Gaussian(1))),
        "result": message(part),
        "closure": message(
            lambda: optim.FGD([spread.requires_grad_()], 0.1, process_group=group).step(
                lambda: spread.square().sum(), weight=1
            )
        ),
    }


def some_processes(params: list[Any]) -> None:
    """A group that does not have all the processes of the parameters."""
    groups = [torch.distributed.new_group([rank]) for rank in range(2)]
    jp.ForwardGradient(params, process_group=groups[torch.distributed.get_rank()])


def inputs_cut(group: Any, **options: Any) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    model: Any = fully_shard(seeded(lambda: nn.Linear(4, 3)), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    opt = optim.HorizonAdam(model.parameters(), process_group=group, **options)
    opt.step(lambda x: model(x).square().sum(1), torch.ones(2, 4, dtype=torch.float64))


def reading_parts(group: Any) -> None:
    """A penalty on the parameters that the optimizer was given."""
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(seeded(lambda: nn.Linear(4, 3)))
    params = list(model.parameters())
    estimate = jp.ForwardGradient(params, process_group=group)
    x = torch.ones(2, 4, dtype=torch.float64)
    estimate(lambda x: model(x).square().sum(1) + params[0].square().sum().full_tensor(), x)


def short_jobs() -> dict[str, Callable[[Place], Any]]:
    """What two processes do in every run of the tests."""
    found: dict[str, Callable[[Place], Any]] = {}
    for kind in ("fsdp", "tensor parallel"):
        found[f"plane, {kind}"] = lambda place, kind=kind: plane(kind, place)
    found["FoMoHKD, fsdp"] = lambda place: stepped("FoMoHKD", "fsdp", place, 2)
    found["FoMoHKD, tensor parallel"] = lambda place: stepped("FoMoHKD", "tensor parallel", place, 2)
    for kind in ("fsdp", "tensor parallel"):
        found[f"journal, {kind}"] = lambda place, kind=kind: journalled(kind, place)
    found["held, fsdp"] = lambda place: held("fsdp", place, 5, clip=0.3, weight_decay=0.1, every=2)
    found["estimated, fsdp"] = lambda place: estimated("fsdp", place)
    found["estimated, weights"] = lambda place: estimated("fsdp", place, estimator="weight", samples=4)
    found["clipped"] = lambda place: stepped("clipped", "fsdp", place, 1)
    found["penalised"] = penalised
    for kind in ("whole", "fsdp", "replicate", "short"):
        found[f"flowing, {kind}"] = lambda place, kind=kind: flowing(kind, place)
    found["refusals"] = refusals
    return found


def steps_jobs() -> dict[str, Callable[[Place], Any]]:
    """What two processes do in the slow tests."""
    return {
        f"{name}, {kind}": lambda place, name=name, kind=kind: stepped(name, kind, place, 6)
        for name in SEARCHES
        for kind in ("fsdp", "tensor parallel")
    }


def both_jobs() -> dict[str, Callable[[Place], Any]]:
    """What four processes do in the slow tests."""
    return {
        "plane, both": lambda place: plane("both", place),
        "held, fsdp": lambda place: held("fsdp", place, 12),
        "held, hybrid": lambda place: held("hybrid", place, 12, clip=0.3, every=2),
    }
