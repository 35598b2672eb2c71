"""Directions that remember: what they hold, where it lives, and that compiled, resumed and copied steps are equal."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from jetplane.ad import _torch
from jetplane.curvature import ExactHessian, GaussNewton
from jetplane.directions import (
    Best,
    Family,
    Fixed,
    Gaussian,
    Gradient,
    Grown,
    Mixed,
    Momentum,
    PerLayer,
    Plane,
    PreviousStep,
    Rademacher,
    RankOne,
    Remembering,
    Taken,
)
from jetplane.optim import Acceptance, FoMoHKD, HyperplaneSearch
from jetplane.optim import compiled as compiled_steps
from jetplane.solvers import LevenbergMarquardt, SaddleFree, Status
from tracing import trace_only

F64 = torch.float64

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


def network(dtype: torch.dtype = F64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def batch(dtype: torch.dtype = F64, count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 4, generator=generator, dtype=dtype), torch.randint(0, 3, (count,), generator=generator)


def search(model: nn.Module, directions: Any, **options: Any) -> HyperplaneSearch:
    parts = {"curvature": GaussNewton(), "solver": LevenbergMarquardt(), "lr": 1.0} | options
    return HyperplaneSearch(model.parameters(), directions=directions, **parts)


def loss_of(model: nn.Module) -> Callable[..., Tensor]:
    return lambda x, y: F.cross_entropy(model(x), y, reduction="none")


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def rows_of(optimizer: HyperplaneSearch) -> Tensor:
    """(K, D): the directions of the optimizer's next step, of equal rates."""
    moving = optimizer._moving()
    leaves = [one.tensor for one in moving]
    group = optimizer.param_groups[0]
    plane = Plane(group["seed"], group["step"], 0, leaves, list, optimizer._memory(moving))
    drawn = optimizer.directions.draw(plane)
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
    family.remember(memory, leaves, Taken(drawn, torch.ones(2, dtype=F64), torch.tensor([1.0, 2.0], dtype=F64)))
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


def test_families_of_a_mix_draw_each_for_itself() -> None:
    x = torch.zeros(50)
    plane = Plane(7, 3, 0, [x], list)
    drawn = Mixed([Gaussian(2), Gaussian(2), Rademacher(1)]).draw(plane)
    rows = drawn.rows(0, x, 0, 5)
    assert torch.equal(rows[:2], Gaussian(2).draw(plane).rows(0, x, 0, 2))
    assert not torch.isclose(rows[:2], rows[2:4]).any()
    assert torch.equal(torch.cat([drawn.rows(0, x, n, n + 1) for n in range(5)]), rows)
    assert Mixed([Gaussian(2), Gaussian(2)]) == Mixed((Gaussian(2), Gaussian(2)))
    assert len({Mixed([Gaussian(2)]), Mixed([Gaussian(2)]), Mixed([Gaussian(3)])}) == 2


def test_a_mix_of_two_that_remember_keeps_two_memories() -> None:
    model, (x, y) = network(), batch()
    optimizer = search(model, [Momentum(0.0), Mixed([Momentum(0.9), Gaussian(2)])])
    for _ in range(3):
        optimizer.step(loss_of(model), x, y)
    kept = optimizer.state[model[0].weight]
    assert set(kept) == {"0.momentum", "1.0.momentum"}
    assert not torch.equal(kept["0.momentum"], kept["1.0.momentum"])


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    shapes=st.lists(st.sampled_from([(), (2,), (3, 2), (1, 2, 2)]), min_size=1, max_size=5),
    k=st.integers(1, 3),
    by=st.sampled_from(["layer", "parameter"]),
    cut=st.tuples(st.integers(0, 14), st.integers(0, 14)),
)
def test_a_split_direction_adds_up_to_the_direction(
    shapes: list[tuple[int, ...]], k: int, by: str, cut: tuple[int, int]
) -> None:
    leaves = [torch.zeros(shape, dtype=F64) for shape in shapes]
    plane = Plane(1, 2, 0, leaves, list)
    whole, split = Gaussian(k).draw(plane), PerLayer(Gaussian(k), by=by).draw(plane)
    starts = [n for n, shape in enumerate(shapes) if by == "parameter" or n == 0 or len(shape) > 1]
    layers = len(starts)
    assert split.k == PerLayer(Gaussian(k), by=by).count(leaves) == k * layers
    for position, leaf in enumerate(leaves):
        rows = split.rows(position, leaf, 0, split.k)
        assert torch.equal(rows.unflatten(0, (k, layers)).sum(1), whole.rows(position, leaf, 0, k))
        layer = sum(start <= position for start in starts) - 1
        others = rows.unflatten(0, (k, layers))[:, [n for n in range(layers) if n != layer]]
        assert not others.any()
        first, last = sorted(min(one, split.k) for one in cut)
        if first < last:
            assert torch.equal(split.rows(position, leaf, first, last), rows[first:last])


# -- where it lives ---------------------------------------------------------------------------------------------------


def steps(optimizer: HyperplaneSearch, model: nn.Module, count: int) -> None:
    x, y = batch(next(model.parameters()).dtype)
    for _ in range(count):
        optimizer.step(loss_of(model), x, y)


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    for one, other in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(one, other)


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """The state as it comes back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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


def test_memory_has_the_dtype_of_its_parameter_also_when_it_is_loaded() -> None:
    model = network(torch.float32)
    optimizer = search(model, [PreviousStep(), Gaussian(2)])
    steps(optimizer, model, 2)
    twin = network(F64)
    other = search(twin, [PreviousStep(), Gaussian(2)])
    other.load_state_dict(optimizer.state_dict())
    assert other.state[twin[0].weight]["0.previous"].dtype == F64
    steps(other, twin, 1)
    short = network(torch.bfloat16)
    other = search(short, [PreviousStep(), Momentum(0.9), Gaussian(2)])
    steps(other, short, 3)
    assert other.state[short[0].weight]["1.momentum"].dtype == torch.bfloat16
    assert all(p.isfinite().all() for p in short.parameters())


def test_a_parameter_that_is_added_or_freed_later_begins_with_nothing() -> None:
    model = network()
    optimizer = search(model[2], [PreviousStep(), Gaussian(2)])
    steps(optimizer, model, 2)
    optimizer.add_param_group({"params": [model[0].weight]})
    steps(optimizer, model, 1)
    model[0].bias.requires_grad_(False)
    optimizer.add_param_group({"params": [model[0].bias]})
    steps(optimizer, model, 1)
    assert "0.previous" not in optimizer.state.get(model[0].bias, {})
    model[0].bias.requires_grad_(True)
    steps(optimizer, model, 2)
    assert optimizer.state[model[0].bias]["0.previous"].any()


def test_memory_of_another_shape_is_refused() -> None:
    model = network()
    optimizer = search(model, [Momentum([0.5, 0.9]), Gaussian(2)])
    steps(optimizer, model, 1)
    other = search(model, [Momentum(0.9), Gaussian(2)])
    other.load_state_dict(optimizer.state_dict())
    message = (
        "the memory '0.momentum' of parameter 0 is (2, 5, 4) torch.float64 on cpu; "
        "expected (1, 5, 4) torch.float64 on cpu."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        steps(other, model, 1)


def test_numbers_as_parameters_are_remembered() -> None:
    x, y = torch.tensor(3.0, dtype=F64, requires_grad=True), torch.empty(0, dtype=F64, requires_grad=True)
    optimizer = FoMoHKD([x, y], directions=Momentum([0.5]), solver=SaddleFree(), patience=None)
    optimizer.step(lambda: x.square() + y.sum())
    assert optimizer.report.status is Status.FLAT  # there is nothing to remember yet
    optimizer.directions = Mixed([Momentum(0.5), PreviousStep(), Gaussian(1)])
    for _ in range(3):
        optimizer.step(lambda: x.square() + y.sum())
    assert abs(float(x.detach())) < 1e-9 and optimizer.state[x]["0.momentum"].shape == (1,)


def test_memory_made_in_inference_mode_is_written_outside_of_it() -> None:
    model, (x, y) = network(), batch()
    optimizer = search(model, [PreviousStep(), Gaussian(2)])
    with torch.inference_mode():
        optimizer.step(loss_of(model), x, y)
    optimizer.step(loss_of(model), x, y)
    assert optimizer.report.status is Status.OK


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


def assert_same_memory(a: HyperplaneSearch, b: HyperplaneSearch, tolerance: float) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    for number, kept in ours["state"].items():
        assert kept.keys() == theirs["state"][number].keys()
        for name, tensor in kept.items():
            torch.testing.assert_close(tensor, theirs["state"][number][name], rtol=tolerance, atol=tolerance)
    for one, other in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert one == other


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("groups", [False, True])
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
    assert other._compiled is not None and not any(p is None for p in other._compiled._programs.values())
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
    assert other._compiled is not None and not any(p is None for p in other._compiled._programs.values())
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
    assert isinstance(family, Family) and isinstance(family, Remembering)
    assert hash(family) == hash(pickle.loads(pickle.dumps(family))) and family == copy.deepcopy(family)


def test_what_has_no_memory_leaves_no_state() -> None:
    model = network()
    optimizer = search(model, [Gaussian(2), Fixed([torch.ones(1, *p.shape, dtype=F64) for p in model.parameters()])])
    steps(optimizer, model, 1)
    assert not optimizer.state_dict()["state"]
