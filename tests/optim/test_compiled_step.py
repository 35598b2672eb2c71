"""Compiled steps and passes give the numbers of the eager ones, are made as often as they must, and fall back with a word.

Most tests trace what would be compiled, and run the trace: the compiler itself takes its time. A few use it.
"""  # noqa: E501

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from compilation import F64, Captures, assert_close, batches, built, either, fallen_back, flat, leaf, mlp
from jetplane.compiler import capture
from jetplane.curvature import ExactHessian, NoCurvature
from jetplane.directions import Coordinate, Fixed, Orthonormal, Rademacher, Sphere
from jetplane.errors import OptimizationStalled
from jetplane.optim import FGD, FoMoH, FoMoHBP, FoMoHKD, GaussNewtonSearch, HyperplaneSearch
from jetplane.optim import compiled_step as compiled_steps
from jetplane.optim.acceptance import Acceptance
from jetplane.optim.reports import LateReport
from jetplane.solvers import JitteredInverse, NegativeSlope, SaddleFree, Status

pytestmark = pytest.mark.usefixtures("nothing_shared")


def rosenbrock(x: Tensor) -> Tensor:
    return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2


# -- problems -------------------------------------------------------------------------------------------------------


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, groups=2, bias=False),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 3, bias=False),
    )


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def cross_entropy(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: F.cross_entropy(model(x), y)


class Unused(nn.Module):
    """A parameter that the loss does not depend on, between two that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.idle, self.last = nn.Linear(5, 3), nn.Linear(2, 2), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = model.parameters()
    return [{"params": [first], "lr": 0.05, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]


def search(directions: Any, curvature: Any = None, solver: Any = None, **options: Any) -> Callable[..., Any]:
    parts = directions, curvature or ExactHessian(), solver or JitteredInverse()
    return lambda model, **more: HyperplaneSearch(model.parameters(), 0.05, *parts, **options, **more)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., HyperplaneSearch]]] = {
    "cnn": (cnn, lambda model, **more: FoMoHKD(model.parameters(), 0.05, k=3, **more)),
    "cnn, first order": (cnn, lambda model, **more: FGD(model.parameters(), 0.01, k=2, **more)),
    "cnn, line": (cnn, lambda model, **more: FoMoH(model.parameters(), 0.5, **more)),
    "cnn, backprop": (cnn, lambda model, **more: FoMoHBP(model.parameters(), 0.5, **more)),
    "batch norm": (mlp, lambda model, **more: FoMoHKD(model.parameters(), 0.05, k=3, **more)),
    "batch norm, backprop": (mlp, lambda model, **more: FoMoHBP(model.parameters(), 0.5, **more)),
    "decay": (small, lambda model, **more: FoMoH(model.parameters(), 0.5, weight_decay=0.1, **more)),
    "clip": (small, lambda model, **more: FoMoH(model.parameters(), 0.5, clip=1e-2, **more)),
    "clip, far": (small, lambda model, **more: FoMoH(model.parameters(), 0.5, clip=1e9, **more)),
    "groups": (small, lambda model, **more: FoMoHKD(groups(model), k=3, **more)),
    "maximize": (small, lambda model, **more: FoMoH(model.parameters(), 0.1, maximize=True, **more)),
    "unused": (Unused, lambda model, **more: FoMoHKD(model.parameters(), 0.05, k=2, **more)),
    "many": (small, lambda model, **more: FoMoHKD(model.parameters(), 0.02, k=5, **more)),
    "seed": (small, lambda model, **more: FoMoH(model.parameters(), 0.5, seed=2**64 - 1, **more)),
    "signs": (small, search(Rademacher(2))),
    "sphere": (small, search(Sphere(2))),
    "orthonormal": (small, search(Orthonormal(2))),
    "coordinates": (lambda: nn.Linear(5, 3, bias=False), search(Coordinate(), NoCurvature(), NegativeSlope())),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("traced")
def test_compiled_steps_are_the_eager_ones(name: str, captures: Captures) -> None:
    make, optimizer = CASES[name]
    x, y = batches("cnn" if make is cnn else "mlp")
    eager, fast = built(make), built(make)
    one, other = optimizer(eager), optimizer(fast, compile=True)
    for number in range(3):
        expected = one.step(cross_entropy(eager), x[number], y[number])
        loss = other.step(cross_entropy(fast), x[number], y[number])
        assert_close(loss, expected)
        assert other.report.status is one.report.status is Status.OK
        for part in ("loss", "slope", "curvature", "coefficients", "predicted"):
            assert_close(getattr(other.report, part), getattr(one.report, part), 1e-10)
        assert other.report.evaluations == 1 and other.report.actual is None
        assert_close(fast.state_dict(), eager.state_dict(), 1e-11)
    assert captures.count == 1
    assert one.param_groups[0]["step"] == other.param_groups[0]["step"] == 3


# -- what a compiled optimizer follows --------------------------------------------------------------------------------


@pytest.mark.usefixtures("traced")
def test_a_scheduler_changes_the_rate_without_a_capture(captures: Captures) -> None:
    x, y = batches("mlp")
    ends = []
    for compile in (False, True):
        model = built(small)
        opt = FoMoH(model.parameters(), 0.5, weight_decay=0.1, compile=compile)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        for number in range(3):
            opt.step(cross_entropy(model), x[number], y[number])
            scheduler.step()
        ends.append(model.state_dict())
    assert_close(*ends)
    assert captures.count == 1


@pytest.mark.usefixtures("traced")
def test_resuming_is_as_if_there_had_been_no_pause() -> None:
    x, y = batches("mlp")

    def fresh() -> tuple[nn.Module, FoMoHKD]:
        model = built(mlp)
        return model, FoMoHKD(model.parameters(), 0.05, k=2, seed=3, compile=True)

    whole, opt = fresh()
    opt.steps(cross_entropy(whole), x, y)
    first, before = fresh()
    before.step(cross_entropy(first), x[0], y[0])
    saved = copy.deepcopy((first.state_dict(), before.state_dict()))
    then, after = fresh()
    then.load_state_dict(saved[0])
    after.load_state_dict(saved[1])
    after.steps(cross_entropy(then), x[1:], y[1:])
    assert_close(then.state_dict(), whole.state_dict(), 0.0)
    assert after.param_groups[0]["step"] == 3


@pytest.mark.usefixtures("traced")
def test_a_state_loaded_into_a_running_optimizer_is_taken_up() -> None:
    x, y = batches("mlp")
    model = built(small)
    opt = FoMoH(model.parameters(), 0.5, compile=True)
    start = copy.deepcopy((model.state_dict(), opt.state_dict()))
    ends = []
    for _ in range(2):
        model.load_state_dict(start[0])
        opt.load_state_dict(copy.deepcopy(start[1]))
        opt.steps(cross_entropy(model), x, y)
        ends.append(copy.deepcopy(model.state_dict()))
    assert_close(*ends, 0.0)


@pytest.mark.usefixtures("traced")
def test_train_eval_and_the_shape_of_a_batch_are_captured_anew(captures: Captures) -> None:
    x, y = batches("mlp")
    eager, fast = built(mlp), built(mlp)
    one, other = FoMoH(eager.parameters(), 0.5), FoMoH(fast.parameters(), 0.5, compile=True)
    counts = []
    for mode, size in ((True, 4), (True, 4), (False, 4), (False, 3), (True, 4), (False, 3)):
        for model, opt in ((eager, one), (fast, other)):
            model.train(mode)
            opt.step(cross_entropy(model), x[0][:size], y[0][:size])
        assert_close(fast.state_dict(), eager.state_dict())
        counts.append(captures.count)
    assert counts == [1, 1, 2, 3, 3, 3]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("form", ["lambda", "partial", "method", "module"])
def test_a_closure_made_anew_for_each_batch_is_captured_once(form: str, captures: Captures) -> None:
    x, y = batches("mlp")
    model = built(small)
    opt = FoMoH(model.parameters(), 0.5, compile=True)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.model(x), y)

    whole = Loss()
    for number in range(3):
        one, target = x[number], y[number]
        if form == "lambda":
            opt.step(lambda: F.cross_entropy(model(one), target))  # noqa: B023 - called at once
        elif form == "partial":
            opt.step(functools.partial(cross_entropy(model), one, target))
        elif form == "method":
            opt.step(whole.forward, one, target)
        else:
            opt.step(whole, one, target)
    assert captures.count == 1


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("case", ["cnn", "batch norm", "groups"])
def test_steps_are_a_loop_of_step(case: str) -> None:
    make, optimizer = CASES[case]
    x, y = batches("cnn" if make is cnn else "mlp")
    ends = []
    for compile, at_once in ((False, False), (False, True), (True, False), (True, True)):
        model = built(make)
        opt = optimizer(model, compile=compile)
        closure = cross_entropy(model)
        if at_once:
            reports = opt.steps(closure, x, y)
            assert len(reports) == 3 and reports.status == [Status.OK] * 3
            losses, slope, bends = reports.loss, reports.slope, reports.curvature
            assert_close(reports[-1].loss, opt.report.loss)
            assert_close(reports.predicted[1], reports[1].predicted)
            assert_close(reports.coefficients[1], reports[1].coefficients)
        else:
            taken = []
            for number in range(3):
                opt.step(closure, x[number], y[number])
                taken.append(opt.report)
            losses, slope, bends = (torch.stack([getattr(r, n) for r in taken]) for n in ("loss", "slope", "curvature"))
        ends.append((model.state_dict(), losses, slope, bends, opt.param_groups[0]["step"]))
    for end in ends[1:]:
        assert_close(end, ends[0], 1e-10)


@pytest.mark.usefixtures("traced")
def test_a_scheduler_has_seen_compiled_steps() -> None:
    (x, y), model = batches("mlp"), built(mlp)
    opt = FoMoH(model.parameters(), 0.5, compile=True)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    opt.steps(cross_entropy(model), x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()  # warns where there was none
    assert opt.param_groups[0]["lr"] == 0.25


@pytest.mark.usefixtures("traced")
def test_aux_is_that_of_each_step() -> None:
    x, y = batches("mlp")
    found = []
    for compile in (False, True):
        model = built(mlp)
        weight, mean = model[0].weight, model[1].running_mean

        def closure(x: Tensor, y: Tensor) -> Any:
            out = model(x)  # noqa: B023 - called at once
            # a tensor of its own, the batch, a parameter and a buffer
            return F.cross_entropy(out, y), {"out": out, "rest": [x, weight, mean], "name": "a"}  # noqa: B023

        opt = FoMoH(model.parameters(), 0.5, compile=compile)
        opt.step(closure, x[0], y[0], has_aux=True)
        one = opt.report.aux
        rest = opt.steps(closure, x[1:], y[1:], has_aux=True)
        found.append((one, rest.aux["out"], rest.aux["rest"], rest[1].aux["out"], opt.report.aux["rest"]))
        assert rest.aux["out"].shape == (2, 4, 3) and one["name"] == "a"
    assert_close(found[1][0]["out"], found[0][0]["out"])
    assert_close(found[1][0]["rest"], found[0][0]["rest"])
    assert_close(found[1][1:4], found[0][1:4])


@pytest.mark.usefixtures("traced")
def test_settings_that_change_are_not_kept(captures: Captures) -> None:
    x, y = batches("mlp")
    eager, fast = built(Unused), built(Unused)
    opts = FoMoH(eager.parameters(), 0.5), FoMoH(fast.parameters(), 0.5, compile=True)

    def both() -> None:
        for model, opt in zip((eager, fast), opts, strict=True):
            opt.step(cross_entropy(model), x[0], y[0])
        assert_close(fast.state_dict(), eager.state_dict())

    both()
    for opt in opts:
        opt.param_groups[0]["weight_decay"] = 0.1
    both()
    for opt in opts:
        opt.clip = 1e-3
    both()
    for model in (eager, fast):
        model.idle.requires_grad_(False)  # the numbers of the parameters behind it change
    both()
    for opt in opts:
        opt.maximize = True
    both()
    for opt in opts:
        opt.add_param_group({"params": [torch.zeros(3, dtype=F64, requires_grad=True)], "lr": 0.1})
    both()
    assert captures.count == 6
    opts[1].samples = 2
    with pytest.raises(ValueError, match="samples is 2; expected 1 with compile=True"):
        both()


@pytest.mark.usefixtures("traced")
def test_autocast_is_seen_by_optimizers_that_are_alike() -> None:
    x, y = (part.float() if part.is_floating_point() else part for part in batches("mlp"))
    losses = {}
    for compile in (False, True):
        for cast in (False, True):
            model = built(small).float()
            opt = FoMoH(model.parameters(), 0.5, compile=compile)
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                losses[compile, cast] = opt.step(cross_entropy(model), x[0], y[0])
    assert losses[False, False] != losses[False, True] and losses[True, False] != losses[True, True]
    assert_close(losses[True, False], losses[False, False], 1e-6)
    assert_close(losses[True, True], losses[False, True], 1e-2)  # the accuracy of bfloat16


@pytest.mark.usefixtures("traced")
def test_optimizers_that_are_alike_share_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(compiled_steps, "compiled", lambda *a, **k: made.append(1) or capture.compiled(*a, **k))
    x, y = batches("mlp")
    for seed in range(3):
        eager, fast = built(small), built(small)
        FoMoH(eager.parameters(), 0.5, seed=seed).step(cross_entropy(eager), x[0], y[0])
        FoMoH(fast.parameters(), 0.5, seed=seed, compile=True).step(cross_entropy(fast), x[0], y[0])
        assert_close(fast.state_dict(), eager.state_dict())
    assert len(made) == 1


@pytest.mark.usefixtures("traced")
def test_a_copy_of_an_optimizer_compiles_for_itself() -> None:
    x, y = batches("mlp")
    model = built(small)
    opt = FoMoH(model.parameters(), 0.5, compile=True)
    opt.step(cross_entropy(model), x[0], y[0])
    twin, again = copy.deepcopy((model, opt))
    for number in (1, 2):
        opt.step(cross_entropy(model), x[number], y[number])
        again.step(cross_entropy(twin), x[number], y[number])
    assert_close(twin.state_dict(), model.state_dict(), 0.0)


@pytest.mark.usefixtures("traced")
def test_inference_mode_is_run_as_it_is_and_leaves_nothing_behind() -> None:
    x, twin = leaf(1.0, 2.0), leaf(1.0, 2.0)
    opt, eager = FoMoH([x], 0.5, compile=True), FoMoH([twin], 0.5)
    with torch.inference_mode():
        scale = torch.ones(2, dtype=F64)
        fallen_back(lambda: opt.step(lambda: (x * scale).square().sum()), "Inference tensors")
    eager.step(lambda: twin.square().sum())
    for _ in range(2):
        opt.step(lambda: x.square().sum())
        eager.step(lambda: twin.square().sum())
        assert_close(x, twin)


@pytest.mark.usefixtures("traced")
def test_a_program_is_captured_a_bounded_number_of_times(captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetplane.compiler.programs._SETS", 1)
    x, twin = leaf(1.0, 2.0), leaf(1.0, 2.0)
    opt, eager = FoMoH([x], 0.5, compile=True), FoMoH([twin], 0.5)

    def of(x: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda batch: (x[0] * batch - x[1]).square().mean()

    def step() -> None:
        opt.step(of(x), torch.ones(size, dtype=F64))

    compiled = []
    for size in [*range(2, 12), 3, 9, 11]:
        if size == 10:
            with pytest.warns(UserWarning, match="is compiled for as many kinds of inputs as torch allows, and is run"):
                step()
        else:
            step()  # further ones do not warn
        compiled.append(isinstance(opt.report, LateReport))
        eager.step(of(twin), torch.ones(size, dtype=F64))
        assert_close(x, twin)
    assert captures.count == 8
    assert compiled == [True] * 8 + [False] * 2 + [True, True, False]  # what was compiled stays in use


# -- steps that are not taken -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("traced")
def test_a_step_that_is_not_finite_leaves_the_parameters() -> None:
    x = leaf(1.0, 2.0)
    opt = FoMoH([x], 0.5, compile=True)

    def closure(scale: Tensor) -> Tensor:
        return (x * scale).square().sum()

    scales = torch.tensor([1.0, torch.nan, 1.0, 0.0, torch.inf], dtype=F64)
    before = []
    for scale in scales:
        before.append(x.detach().clone())
        opt.step(closure, scale)
        expected = Status.OK if scale == 1 else Status.FLAT if scale == 0 else Status.NONFINITE
        assert opt.report.status is expected
        assert torch.equal(x.detach(), before[-1]) == (expected is not Status.OK)
        assert opt.param_groups[0]["bad"] == (1 if expected is Status.NONFINITE else 0)
    again = leaf(1.0, 2.0)
    reports = FoMoH([again], 0.5, compile=True).steps(lambda scale: (again * scale).square().sum(), scales)
    ok, bad, flat = Status.OK, Status.NONFINITE, Status.FLAT
    assert reports.status == [ok, bad, ok, flat, bad]
    assert_close(again, x)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("compile", [False, True])
def test_patience_ends(compile: bool) -> None:
    x = leaf(1.0, 2.0)
    opt = FoMoH([x], patience=3, compile=compile)

    def closure(scale: Tensor) -> Tensor:
        return (x * scale).square().sum()

    for _ in range(5):  # without slope nothing is wrong
        opt.step(closure, torch.tensor(0.0, dtype=F64))
    nothing = torch.tensor(torch.nan, dtype=F64)
    for _ in range(2):  # it counts from the start after it has raised
        for _ in range(2):
            opt.step(closure, nothing)
        with pytest.raises(OptimizationStalled, match=r"3 steps in a row did not move .* status NONFINITE"):
            opt.step(closure, nothing)
    opt.patience = None
    for _ in range(5):
        opt.step(closure, nothing)


# -- programs that cannot be compiled ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("traced")
def test_control_flow_that_depends_on_data_falls_back_once() -> None:
    x, twin = leaf(1.0, 2.0), leaf(1.0, 2.0)

    def closure(x: Tensor) -> Tensor:
        return x.square().sum() if x.sum() > 0 else x.sin().sum()

    opt, eager = FoMoHKD([x], k=2, compile=True), FoMoHKD([twin], k=2)

    def step() -> None:
        opt.step(lambda: closure(x))

    fallen_back(
        step, r"cannot be compiled and is run as it is: Data-dependent .*test_compiled_step.py\", line \d+, in closure"
    )
    eager.step(lambda: closure(twin))
    assert torch.equal(x, twin)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    eager.step(lambda: closure(twin))
    assert torch.equal(x, twin) and opt.param_groups[0]["step"] == 2


@pytest.mark.usefixtures("traced")
def test_a_step_that_would_wait_for_the_device_falls_back() -> None:
    x, twin = leaf(1.0, 2.0), leaf(1.0, 2.0)

    def closure(x: Tensor) -> Tensor:
        return x.square().sum() * float(x.detach().sum())

    opt = FoMoHKD([x], k=2, compile=True)
    fallen_back(lambda: opt.step(lambda: closure(x)), r"it asks for the value of a tensor.*line \d+, in closure")
    FoMoHKD([twin], k=2).step(lambda: closure(twin))
    assert torch.equal(x, twin)
    fast, rows = jp.compile(jp.quadratic), torch.eye(2, dtype=F64)
    for scale in (1.0, 2.0):  # there is nothing to replay here: it waits, and reads the value of each call
        point = x.detach() + scale
        assert_close(flat(fast(closure, point, rows)), flat(jp.quadratic(closure, point, rows)))


@pytest.mark.usefixtures("traced")
def test_parameters_that_share_memory_with_what_is_read_fall_back() -> None:
    ends = []
    for compile in (False, True):
        storage = torch.tensor([1.0, 2.0, 3.0], dtype=F64)
        x, other = storage[:2].requires_grad_(), storage.detach()
        opt = FoMoH([x], 0.5, compile=compile)

        def step() -> None:
            opt.step(lambda: ((x - other[2]) ** 2 * x).sum())  # noqa: B023 - called at once

        if compile:
            fallen_back(step, "two of the tensors that the program reads share memory, and one of them is written")
        else:
            step()
        ends.append(storage.clone())
    assert torch.equal(*ends)


@pytest.mark.usefixtures("traced")
def test_directions_that_are_tensors_of_the_users_fall_back() -> None:
    ends = []
    for compile in (False, True):
        x = leaf(1.0, 2.0)
        opt = HyperplaneSearch(
            [x], 1.0, Fixed([torch.eye(2, dtype=F64)]), ExactHessian(), JitteredInverse(), compile=compile
        )

        def step() -> None:
            opt.step(lambda: rosenbrock(x))  # noqa: B023 - called at once

        if compile:
            fallen_back(step, "is run as it is: ")
        else:
            step()
        ends.append(x.detach())
    assert torch.equal(*ends)


@pytest.mark.usefixtures("traced")
def test_random_numbers_of_a_backward_pass_fall_back() -> None:
    x = leaf(1.0, 2.0)
    opt = FoMoHBP([x], compile=True)
    fallen_back(
        lambda: opt.step(lambda: F.dropout(x, 0.5).square().sum()),
        "its random numbers would not be the same in the backward pass and in the forward one",
    )


@pytest.mark.usefixtures("traced")
@pytest.mark.filterwarnings("error:.*is run as it is:UserWarning")
@pytest.mark.parametrize(
    "make", [FoMoHBP, functools.partial(GaussNewtonSearch, k=3)], ids=["backward pass", "a second pass"]
)
def test_attention_without_dropout_is_compiled(make: Callable[..., Any]) -> None:
    ends = []
    for compile in (False, True):
        x = torch.linspace(-1, 1, 24, dtype=F64).reshape(1, 2, 3, 4).requires_grad_()
        opt = make([x], compile=compile)
        for _ in range(2):
            opt.step(lambda: F.mse_loss(F.scaled_dot_product_attention(x, x, x), x.detach() / 2))  # noqa: B023
        ends.append(x.detach())
    assert_close(*ends)


@pytest.mark.usefixtures("traced")
def test_dropout_draws_what_it_draws_in_an_eager_step() -> None:
    ends = []
    for compile in (False, True):
        x = torch.linspace(-1, 1, 20, dtype=F64).requires_grad_()
        opt = FoMoH([x], 0.5, compile=compile)
        torch.manual_seed(5)
        for _ in range(3):
            opt.step(lambda: F.dropout(x, 0.5).square().sum())  # noqa: B023 - called at once
        ends.append(x.detach())
    assert_close(*ends)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("closure", "message"),
    [
        (lambda x: x[None] * 2, r"the closure returned a tensor of shape \(1, 2\); expected a scalar loss"),
        (lambda x: 3.0, "the closure returned float 3.0; expected the loss as a scalar tensor"),
    ],
)
def test_a_wrong_closure_is_told_as_it_is_eagerly(closure: Callable[..., Any], message: str) -> None:
    x = leaf(1.0, 2.0)
    with pytest.warns(UserWarning, match="is run as it is"), pytest.raises((TypeError, ValueError), match=message):
        FoMoH([x], compile=True).step(lambda: closure(x))


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accept": Acceptance(backtracks=1)}, "the acceptance has 1 backtracks; expected 0 with compile=True"),
        ({"chunk_size": 2}, "chunk_size is 2, which needs several passes; expected None with compile=True"),
        ({"memory": "4GiB"}, "memory is .4GiB., which may need several passes; expected None with compile=True"),
        ({"samples": 2}, "samples is 2; expected 1 with compile=True"),
        ({"solver": SaddleFree()}, "the solver SaddleFree asks the host; expected one with a method traced"),
    ],
)
def test_settings_that_are_not_compiled(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FoMoHKD([leaf(1.0, 2.0)], k=2, compile=True, **options)


@pytest.mark.usefixtures("traced")
def test_a_closure_without_the_parameters_is_refused() -> None:
    x, other = leaf(1.0, 2.0), leaf(1.0, 2.0)
    opt = FoMoH([x], compile=True)
    with pytest.raises(ValueError, match="the closure uses none of the parameters; expected a loss that depends"):
        opt.step(lambda: other.square().sum())


@pytest.mark.usefixtures("traced")
def test_other_parameters_than_the_optimizers_are_refused() -> None:
    x, other = leaf(1.0, 2.0), leaf(1.0, 2.0)

    def of(x: Tensor) -> Callable[[], Tensor]:
        return lambda: x.square().sum()

    opt = FoMoH([x], compile=True)
    opt.step(of(x))
    before = other.detach().clone()
    with pytest.raises(RuntimeError, match="reads other parameters than those it was compiled with"):
        opt.step(of(other))
    assert torch.equal(other.detach(), before)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    ("closure", "batch", "error", "message"),
    [
        ([torch.sum], (torch.ones(2),), TypeError, "steps got list; expected a function of a batch"),
        (torch.sum, (), ValueError, r"the batches are \[\]; expected tensors with a first axis of one length"),
        (torch.sum, (torch.ones(2), 3), ValueError, r"the batches are \[\(2,\), 'int'\]; expected tensors"),
        (torch.sum, (torch.ones(()),), ValueError, r"the batches are \[\(\)\]; expected tensors"),
        (torch.sum, (torch.ones(2), torch.ones(3)), ValueError, r"the batches are \[\(2,\), \(3,\)\]; expected"),
        (torch.sum, (torch.ones(0, 2),), ValueError, "the batches have no entries; expected at least one step"),
    ],
)
def test_batches_that_are_no_steps(compile: bool, closure: Any, batch: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        FoMoH([leaf(1.0, 2.0)], compile=compile).steps(closure, *batch)


# -- jetplane.compile -------------------------------------------------------------------------------------------------


# -- the layouts of CUDA, on the CPU ----------------------------------------------------------------------------------


# -- the compiler itself ----------------------------------------------------------------------------------------------


def test_steps_through_the_compiler() -> None:
    ends = []
    for compile in (False, True):
        x = leaf(-1.2, 1.0)
        opt = FoMoHKD([x], 1.0, k=2, seed=1, compile=compile)
        before = x._version
        losses = [float(opt.step(lambda: rosenbrock(x))) for _ in range(4)]  # noqa: B023 - called at once
        assert isinstance(opt.report, LateReport) == compile
        assert x._version > before  # autograd must see that it was written
        ends.append((x.detach(), torch.tensor(losses)))
    assert_close(ends[1], ends[0], 1e-9)


@pytest.mark.slow
def test_a_network_through_the_compiler() -> None:
    x, y = batches("mlp")
    eager, fast = built(mlp), built(mlp)
    FoMoHKD(eager.parameters(), 0.05, k=3).steps(cross_entropy(eager), x, y)
    FoMoHKD(fast.parameters(), 0.05, k=3, compile=True).steps(cross_entropy(fast), x, y)
    assert_close(fast.state_dict(), eager.state_dict(), 1e-10)


# -- replayed as CUDA graphs ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_replayed_steps_write_the_parameters_where_they_are() -> None:
    x, y = (part.cuda() for part in batches("mlp", count=12))
    ends = []
    for compile in (False, True):
        model = built(mlp).cuda()
        opt = FoMoHKD(model.parameters(), 0.05, k=3, compile=compile)
        opt.steps(cross_entropy(model), x[:6], y[:6])
        for p in model.parameters():
            p.data = p.data.clone()  # at another address from here on
        opt.steps(cross_entropy(model), x[6:9], y[6:9])
        for number in range(9, 12):
            opt.step(cross_entropy(model), x[number], y[number])
        ends.append(model.state_dict())
    assert_close(ends[1], ends[0], 1e-9)


@pytest.mark.parametrize("pairs", ["all", "diagonal", "star", "laplacian", "none"])
@either
def test_more_directions_than_are_compared_at_a_time(
    compiler: bool, pairs: str, request: pytest.FixtureRequest
) -> None:
    if not compiler:
        request.getfixturevalue("traced")
    x, directions = torch.randn(3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)

    def func(x: Tensor) -> Tensor:
        return x.sin() * x.prod()

    found, expected = jp.compile(jp.jet)(func, x, directions, pairs), jp.jet(func, x, directions, pairs)
    for part in ("primal", "tangent", "second"):
        torch.testing.assert_close(getattr(found, part), getattr(expected, part))


# -- where the program switches autograd off ------------------------------------------------------------------------


def bootstrapped(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Learns from its own predictions, which are constants."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = 0.9 * model(x.flip(0)).tanh() + y[:, None]
        return F.mse_loss(model(x), target)

    return loss


@pytest.mark.usefixtures("traced")
@pytest.mark.filterwarnings("error:.*is run as it is")
@pytest.mark.parametrize("make", [FoMoHKD, GaussNewtonSearch, FoMoHBP])
def test_tangents_of_a_step_stop_where_the_program_switches_autograd_off(make: Any) -> None:
    x, y = batches("mlp")
    ends = []
    for compile in (False, True):
        model = built(small)
        options = {} if make is FoMoHBP else {"k": 3}
        opt = make(model.parameters(), 0.05, compile=compile, **options)
        for one, target in zip(x, y, strict=True):
            opt.step(bootstrapped(model), one, target)
        ends.append(model.state_dict())
    assert_close(ends[1], ends[0], 1e-9)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.usefixtures("traced")
def test_the_slope_of_a_step_is_backprops_where_autograd_is_switched_off(compile: bool) -> None:
    model, (x, y) = built(small), batches("mlp", count=1)
    bootstrapped(model)(x[0], y[0]).backward()
    before = copy.deepcopy(model.state_dict())
    gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    opt = FGD(model.parameters(), 1e-3, compile=compile)
    opt.step(bootstrapped(model), x[0], y[0])
    moved = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    # the step is lr c v and the slope g . v, so that lr c (g . v) is the gradient's product with the step
    along = sum(float((gradient[name] * moved[name]).sum()) for name in gradient)
    by_slope = float(opt.report.slope @ opt.report.coefficients) * 1e-3
    assert by_slope == pytest.approx(along, rel=1e-9)


# -- torch's compiler -------------------------------------------------------------------------------------------------
