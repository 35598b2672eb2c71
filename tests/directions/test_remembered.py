"""Directions that remember: what they hold, where it lives, and that compiled, resumed and copied steps are equal."""

from __future__ import annotations

import copy
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jetplane.ad import _torch
from jetplane.curvature import ExactHessian, GaussNewton
from jetplane.directions import (
    Best,
    Family,
    Fixed,
    Gaussian,
    Gradient,
    Grown,
    Learning,
    Learnt,
    Mixed,
    Momentum,
    PerLayer,
    Plane,
    PreviousStep,
    Rademacher,
    RankOne,
    Taken,
)
from jetplane.directions.earlier import adopted
from jetplane.optim import Acceptance, FoMoHKD, HyperplaneSearch
from jetplane.optim import compiled_step as compiled_steps
from jetplane.solvers import LevenbergMarquardt, SaddleFree, Status
from searches import F64, assert_same_memory, batch, loss_of, network, saved, search, steps
from tracing import trace_only

FAMILIES: dict[str, Family | list[Family]] = {
    "previous": PreviousStep(),
    "momentum": Momentum([0.5, 0.9]),
    "best": Best(2),
    "per layer": PerLayer(PreviousStep()),
}
MIXES: dict[str, list[Family]] = {
    "previous": [PreviousStep(), Gaussian(3)],
    "momentum": [Momentum([0.5, 0.9]), Gaussian(2)],
    "best": [Best(2), Gaussian(3)],
    "per layer": [PerLayer(PreviousStep()), Gaussian(2)],
    "per parameter": [PerLayer(Momentum(0.9), by="parameter"), Rademacher(2)],
    "rank one": [Momentum([0.0, 0.9]), RankOne(5)],
    "all": [PreviousStep(), Momentum(0.9), Best(1), PerLayer(PreviousStep()), Gaussian(2)],
}


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def rows_of(optimizer: HyperplaneSearch) -> Tensor:
    """(K, D): the directions of the optimizer's next step, of equal rates."""
    moving = optimizer._checked()
    leaves = moving.tensors
    group = optimizer.param_groups[0]
    learnt = Learnt(optimizer._memory(moving), group["size"])
    drawn = adopted(optimizer.directions).draw(Plane(group["seed"], group["step"], 0, leaves, list), learnt)
    return torch.cat([drawn.rows(n, leaf.detach(), 0, drawn.k).flatten(1) for n, leaf in enumerate(leaves)], dim=1)


def along(direction: Tensor) -> Tensor:
    return direction * (len(direction) ** 0.5 / direction.norm())


# -- what they remember ---------------------------------------------------------------------------------------------


def test_the_previous_step_is_the_update_that_was_taken() -> None:
    model, (x, y) = network(), batch()
    optimizer = search(model, [PreviousStep(), Gaussian(3)], weight_decay=0.1, clip=0.05)
    assert not rows_of(optimizer)[0].any()
    for _ in range(3):
        before = flat(list(model.parameters()))
        optimizer.step(loss_of(model), x, y)
        update = flat(list(model.parameters())) - (1 - 0.1) * before  # without the decay
        torch.testing.assert_close(rows_of(optimizer)[0], along(update))


def test_momentum_averages_the_updates_over_each_horizon() -> None:
    model, (x, y) = network(), batch()
    optimizer = search(model, [Momentum([0.5, 0.9]), Gaussian(2)])
    averages = torch.zeros(2, sum(p.numel() for p in model.parameters()), dtype=F64)
    for _ in range(4):
        before = flat(list(model.parameters()))
        optimizer.step(loss_of(model), x, y)
        step = flat(list(model.parameters())) - before
        averages = torch.stack([beta * m + (1 - beta) * step for m, beta in zip(averages, (0.5, 0.9), strict=True)])
        torch.testing.assert_close(rows_of(optimizer)[:2], torch.stack([along(m) for m in averages]))


def test_the_best_directions_are_those_with_the_largest_shares() -> None:
    model, (x, y) = network(), batch()
    optimizer = search(model, [Best(2), Gaussian(20)])
    for _ in range(3):
        rows = rows_of(optimizer)
        optimizer.step(loss_of(model), x, y)
        report = optimizer.report
        shares = -report.coefficients * report.slope
        best = shares.argsort(descending=True)[:2]
        torch.testing.assert_close(rows_of(optimizer)[:2], torch.stack([along(row) for row in rows[best]]))


def test_fewer_directions_than_are_to_be_kept() -> None:
    model = network()
    family = Best(3)
    memory = {"best": [torch.ones(3, *p.shape, dtype=F64) for p in model.parameters()]}
    leaves = [p.detach() for p in model.parameters()]
    drawn = Gaussian(2).draw(Plane(0, 0, 0, leaves, list))
    taken = Taken(drawn, torch.ones(2, dtype=F64), torch.tensor([1.0, 2.0], dtype=F64), leaves)
    assert family.update(Learnt(memory), taken) == Learnt(memory)
    kept = memory["best"][0]
    assert torch.equal(kept[:2], drawn.rows(0, leaves[0], 0, 2).flip(0)) and not kept[2].any()


def test_a_step_that_is_not_taken_is_not_remembered() -> None:
    x = torch.tensor([1.0, 2.0], dtype=F64, requires_grad=True)
    optimizer = FoMoHKD([x], directions=[PreviousStep(), Gaussian(1)], solver=SaddleFree(), patience=None)
    optimizer.step(lambda: x.square().sum())
    remembered = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.step(lambda: x.square().sum() * torch.nan)
    assert optimizer.report.status is Status.NONFINITE
    assert torch.equal(optimizer.state_dict()["state"][0]["0.previous"], remembered[0]["0.previous"])
    optimizer.accept = Acceptance(fraction=0.999999)
    optimizer.step(lambda: x.abs().sqrt().sum())
    assert optimizer.report.status is Status.REJECTED
    assert torch.equal(optimizer.state_dict()["state"][0]["0.previous"], remembered[0]["0.previous"])


def test_groups_with_their_own_rates_remember_their_own_lines() -> None:
    """The rate stretches the direction once: the remembered row, stretched, is the update again."""
    model, (x, y) = network(), batch()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]
    optimizer = HyperplaneSearch(groups, 1.0, [PreviousStep(), Gaussian(4)], GaussNewton(), LevenbergMarquardt())
    scales = flat([torch.full_like(p, s) for part, s in ((model[0], 0.1), (model[2], 1.0)) for p in part.parameters()])
    for _ in range(3):
        before = flat(list(model.parameters()))
        optimizer.step(loss_of(model), x, y)
        update = flat(list(model.parameters())) - before
        torch.testing.assert_close(along(rows_of(optimizer)[0] * scales), along(update))


def test_a_frozen_group_and_an_unused_parameter_have_not_moved() -> None:
    model, (x, y) = network(), batch()
    unused = torch.ones(3, dtype=F64, requires_grad=True)
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": [*model[2].parameters(), unused]}]
    optimizer = HyperplaneSearch(groups, 1.0, [PreviousStep(), Gaussian(4)], GaussNewton(), LevenbergMarquardt())
    for _ in range(2):
        optimizer.step(loss_of(model), x, y)
    kept = optimizer.state
    assert not kept[model[0].weight]["0.previous"].any() and not kept[unused]["0.previous"].any()
    assert kept[model[2].weight]["0.previous"].any()


def test_several_planes_are_remembered_as_one_step() -> None:
    model, (x, y) = network(), batch()
    optimizer = search(model, [PreviousStep(), Best(1), Gaussian(2)], samples=3)
    for _ in range(2):
        before = flat(list(model.parameters()))
        optimizer.step(loss_of(model), x, y)
        torch.testing.assert_close(rows_of(optimizer)[0], along(flat(list(model.parameters())) - before))


def test_maximising_remembers_what_gained() -> None:
    x = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=F64, requires_grad=True)
    optimizer = FoMoHKD([x], directions=[Best(1), Gaussian(3)], solver=SaddleFree(), maximize=True)
    rows = rows_of(optimizer)
    optimizer.step(lambda: -x.square().sum() - x[0] * x[1])
    report = optimizer.report
    best = (report.coefficients * report.slope).argmax()  # upwards: a share is c_k g_k
    torch.testing.assert_close(rows_of(optimizer)[0], along(rows[best]))


# -- families of families -------------------------------------------------------------------------------------------


# -- where it lives ---------------------------------------------------------------------------------------------------


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    for one, other in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", MIXES)
def test_resuming_is_bit_exact(name: str) -> None:
    model = network(torch.float32)
    optimizer = search(model, MIXES[name], patience=None)
    steps(optimizer, model, 4)
    twin = copy.deepcopy(model)
    other = search(twin, MIXES[name], patience=None)
    other.load_state_dict(saved(optimizer.state_dict()))
    steps(optimizer, model, 4)
    steps(other, twin, 4)
    assert_equal(model, twin)


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
def test_a_copy_goes_on_alone(name: str, how: Callable[[Any], Any]) -> None:
    model = network(torch.float32)
    optimizer = search(model, MIXES[name], patience=None)
    steps(optimizer, model, 3)
    twin, other = how((model, optimizer))
    steps(other, twin, 3)
    before = copy.deepcopy(twin)
    steps(optimizer, model, 3)
    assert_equal(model, twin)
    assert_equal(before, twin)


# -- they help --------------------------------------------------------------------------------------------------------


def test_with_the_previous_step_a_plane_is_a_conjugate_gradient() -> None:
    """On a quadratic bowl of D dimensions gradient and previous step are enough: D steps find the minimum."""
    torch.manual_seed(0)
    root = torch.randn(6, 6, dtype=F64)
    matrix = root @ root.T + torch.eye(6, dtype=F64)
    x = torch.randn(6, dtype=F64, requires_grad=True)
    optimizer = FoMoHKD([x], directions=[PreviousStep(), Gradient()], solver=SaddleFree(), patience=None)
    for _ in range(6):
        optimizer.step(lambda: x @ matrix @ x / 2)
    assert float(x.detach().norm()) < 1e-9


# -- compiled ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be compiled is traced, and the trace is run."""
    monkeypatch.setattr(_torch, "compiled", trace_only)
    monkeypatch.setattr(compiled_steps, "_SHARED", OrderedDict())


# each mix once in every run, some of them in several groups; the other form of each is slow
IN_GROUPS = ("momentum", "per layer", "all")
FORMS = [
    pytest.param(name, groups, marks=[] if groups == (name in IN_GROUPS) else pytest.mark.slow)
    for name in MIXES
    for groups in (False, True)
]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(("name", "groups"), FORMS)
def test_compiled_steps_are_the_eager_ones(name: str, groups: bool) -> None:
    x, y = batch()
    made = []
    for compile in (False, True):
        model = network()
        params: Any = list(model.parameters())
        if groups:
            params = [{"params": params[:2], "lr": 0.3}, {"params": params[2:], "weight_decay": 0.01}]
        options: dict[str, Any] = {"accept": Acceptance(), "clip": 0.5, "compile": compile}
        optimizer = HyperplaneSearch(params, 1.0, MIXES[name], GaussNewton(), LevenbergMarquardt(), **options)
        for _ in range(5):
            loss = optimizer.step(loss_of(model), x, y)
        made.append((model, optimizer, loss))
    (eager, one, loss), (compiled, other, same) = made
    assert other._compiled is not None and not any(p is None for p in other._compiled._programs._captured.values())
    torch.testing.assert_close(loss, same, rtol=1e-9, atol=1e-9)
    for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    assert_same_memory(one, other, 1e-8)
    assert other.report.evaluations == one.report.evaluations == 2
    torch.testing.assert_close(other.report.actual, one.report.actual, rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("traced")
def test_a_compiled_step_that_is_not_taken_is_not_remembered() -> None:
    x = torch.tensor([1.0, 2.0], dtype=F64, requires_grad=True)
    optimizer = HyperplaneSearch(
        [x], 1.0, [PreviousStep(), Gaussian(1)], ExactHessian(), LevenbergMarquardt(), compile=True, patience=None
    )

    def loss(scale: Tensor) -> Tensor:
        return x.square().sum() * scale

    optimizer.step(loss, torch.ones((), dtype=F64))
    before, point = copy.deepcopy(optimizer.state_dict()), x.detach().clone()
    optimizer.step(loss, torch.full((), torch.nan, dtype=F64))
    assert optimizer.report.status is Status.NONFINITE
    after = optimizer.state_dict()
    assert torch.equal(before["state"][0]["0.previous"], after["state"][0]["0.previous"])
    assert before["param_groups"][0]["solver_state"] == after["param_groups"][0]["solver_state"]
    assert torch.equal(x.detach(), point) and after["param_groups"][0]["bad"] == 1


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", ["previous", "all"])
def test_compiled_steps_resume_and_are_copied(name: str) -> None:
    x, y = batch()
    xs, ys = x.expand(3, *x.shape), y.expand(3, *y.shape)
    model = network()
    optimizer = search(model, MIXES[name], compile=True)
    optimizer.steps(loss_of(model), xs, ys)
    twin, other = copy.deepcopy((model, optimizer))
    third = copy.deepcopy(model)
    resumed = search(third, MIXES[name], compile=True)
    resumed.load_state_dict(saved(optimizer.state_dict()))
    for one, net in ((optimizer, model), (other, twin), (resumed, third)):
        one.steps(loss_of(net), xs, ys)
    assert_equal(model, twin)
    assert_equal(model, third)
    assert_same_memory(optimizer, resumed, 0.0)
    optimizer.load_state_dict(other.state_dict())  # into one whose device has gone on by itself
    assert optimizer.state_dict()["param_groups"] == other.state_dict()["param_groups"]


@pytest.mark.slow
def test_through_the_compiler() -> None:
    made = []
    for compile in (False, True):
        model = network()
        optimizer = search(model, MIXES["all"], compile=compile)
        steps(optimizer, model, 3)
        made.append((model, optimizer))
    (eager, one), (compiled, other) = made
    assert other._compiled is not None and not any(p is None for p in other._compiled._programs._captured.values())
    for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    assert_same_memory(one, other, 1e-8)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Mixed([]), ValueError, "the list of directions is empty; expected at least one family."),
        (
            lambda: Mixed(Gaussian(2)),  # type: ignore[arg-type]
            TypeError,
            "the families of directions are Gaussian; expected a list such as [PreviousStep(), Gaussian(31)].",
        ),
        (
            lambda: Mixed([Gaussian(2), 3]),  # type: ignore[list-item]
            TypeError,
            "entry 1 of the directions is int; expected a family such as Gaussian(31).",
        ),
        (
            lambda: Mixed([Grown(Gaussian), Gaussian(2)]),
            ValueError,
            "entry 0 of the directions changes its size; expected it to be the last one.",
        ),
        (lambda: Momentum(1.0), ValueError, "beta is 1.0; expected a number from 0, below 1."),
        (lambda: Momentum([0.9, -0.1]), ValueError, "beta is -0.1; expected a number from 0, below 1."),
        (lambda: Momentum(["a"]), ValueError, "beta is 'a'; expected a number from 0, below 1."),  # type: ignore[list-item]
        (lambda: Momentum([]), ValueError, "there are no betas; expected at least one."),
        (lambda: Best(0), ValueError, "kept is 0; expected a whole number of directions from 1."),
        (lambda: Best(1.5), ValueError, "kept is 1.5; expected a whole number of directions from 1."),  # type: ignore[arg-type]
        (
            lambda: PerLayer(3),  # type: ignore[arg-type]
            TypeError,
            "the family to split is int; expected a family of directions such as PreviousStep().",
        ),
        (
            lambda: PerLayer(Grown(Gaussian)),
            ValueError,
            "the family to split changes its size; expected one of a fixed size.",
        ),
        (lambda: PerLayer(Gaussian(2), by="row"), ValueError, "by is 'row'; expected 'layer' or 'parameter'."),
        (
            lambda: PreviousStep().draw(Plane(0, 0, 0, [torch.zeros(2)], list)),
            ValueError,
            "the plane has no memory 'previous'; expected what the optimizer keeps for its directions.",
        ),
        (
            lambda: FoMoHKD([torch.zeros(9, requires_grad=True)], k=3, directions=Gaussian(2)),
            TypeError,
            "k is 3 and there are directions, too; expected one of them.",
        ),
    ],
)
def test_bad_arguments(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        make()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_families_are_hashable_parts(family: Family) -> None:
    assert isinstance(family, Family) and isinstance(family, Learning) and family.init().slots
    assert hash(family) == hash(pickle.loads(pickle.dumps(family))) and family == copy.deepcopy(family)


def test_what_has_no_memory_leaves_no_state() -> None:
    model = network()
    optimizer = search(model, [Gaussian(2), Fixed([torch.ones(1, *p.shape, dtype=F64) for p in model.parameters()])])
    steps(optimizer, model, 1)
    assert not optimizer.state_dict()["state"]
