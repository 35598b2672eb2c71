"""Compiled steps and passes give the numbers of the eager ones, are made as often as they must, and fall back with a word.

Most tests trace what would be compiled, and run the trace: the compiler itself takes its time. A few use it.
"""  # noqa: E501

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from jetplane.ad import _torch, capture
from jetplane.ad.rules.products import Convolution, MatMul
from jetplane.curvature import ExactHessian, NoCurvature
from jetplane.directions import Coordinate, Fixed, Orthonormal, Rademacher, Sphere
from jetplane.errors import OptimizationStalled
from jetplane.optim import FGD, FoMoH, FoMoHBP, FoMoHKD, GaussNewtonSearch, HyperplaneSearch
from jetplane.optim import compiled as compiled_steps
from jetplane.optim.acceptance import Acceptance
from jetplane.optim.report import LateReport
from jetplane.solvers import JitteredInverse, NegativeSlope, SaddleFree, Status
from tracing import trace_only

F64 = torch.float64


@pytest.fixture(autouse=True)
def nothing_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test runs what another one has compiled."""
    monkeypatch.setattr(compiled_steps, "_SHARED", OrderedDict())


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be compiled is traced, and the trace is run."""
    monkeypatch.setattr(_torch, "compiled", trace_only)


class Captures:
    """How many graphs were captured."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "jetplane")
        self._caplog = caplog

    @property
    def count(self) -> int:
        return sum(record.getMessage().startswith("captured graph") for record in self._caplog.records)


@pytest.fixture
def captures(caplog: pytest.LogCaptureFixture) -> Captures:
    return Captures(caplog)


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def leaf(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=F64, requires_grad=True)


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


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def batches(model: str, count: int = 3, size: int = 4) -> tuple[Tensor, Tensor]:
    shape = (2, 12, 12) if model == "cnn" else (5,)
    made = torch.Generator().manual_seed(1)
    x = torch.randn(count, size, *shape, dtype=F64, generator=made)
    return x, torch.randint(3, (count, size), generator=made)


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


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
def test_functions_that_share_a_name_do_not_share_what_is_compiled() -> None:
    def raised(power: int) -> Callable[[Tensor], Tensor]:
        @torch.compiler.allow_in_graph
        def function(x: Tensor) -> Tensor:
            return x**power

        return function

    for power in (2, 4):
        x, function = leaf(2.0, 1.0), raised(power)
        loss = FoMoH([x], compile=True).step(lambda: function(x).sum())  # noqa: B023 - called at once
        assert float(loss) == 2.0**power + 1


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
def test_a_program_is_captured_a_bounded_number_of_times(captures: Captures) -> None:
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
        assert opt.param_groups[0]["bad"] == (0 if scale == 1 else opt.param_groups[0]["bad"])
    assert opt.param_groups[0]["bad"] == 2
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


def fallen_back(step: Callable[[], Any], match: str) -> None:
    """Run it: there is one warning, with the line of this file that took the step."""
    with pytest.warns(UserWarning, match=match) as caught:
        step()
    (one,) = [w for w in caught if "is run as it is" in str(w.message)]
    assert one.filename == __file__


@pytest.mark.usefixtures("traced")
@torch._dynamo.config.patch(recompile_limit=2)
def test_a_captured_program_says_how_often_it_changed() -> None:
    program = capture.Captured(lambda graph, inputs: graph, capture.single)
    for size in (2, 3):
        assert float(program(torch.sum, (torch.ones(size),))) == size
    with pytest.raises(capture.CaptureFailed, match=r"^its shapes, modes or numbers changed 2 times, the limit$"):
        program(torch.sum, (torch.ones(4),))


@pytest.mark.usefixtures("traced")
def test_control_flow_that_depends_on_data_falls_back_once() -> None:
    x, twin = leaf(1.0, 2.0), leaf(1.0, 2.0)

    def closure(x: Tensor) -> Tensor:
        return x.square().sum() if x.sum() > 0 else x.sin().sum()

    opt, eager = FoMoHKD([x], k=2, compile=True), FoMoHKD([twin], k=2)

    def step() -> None:
        opt.step(lambda: closure(x))

    fallen_back(
        step, r"cannot be compiled and is run as it is: Data-dependent .*test_compiled.py\", line \d+, in closure"
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


def test_a_compiler_that_is_wrong_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        run, written = trace_only(function, inputs)
        return (lambda tensors: [1.1 * out for out in run(tensors)]), written

    monkeypatch.setattr(_torch, "compiled", wrong)
    x = leaf(1.0, 2.0)
    opt = FoMoHKD([x], k=2, compile=True)
    fallen_back(
        lambda: opt.step(lambda: x.square().sum()), r"its output 0 differs by 1\.0e-01 from what it is uncompiled"
    )
    assert float(x.detach().norm()) < 1e-6  # an eager step was taken


def test_a_compiler_that_fails_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        raise KeyError("no such kernel.")

    monkeypatch.setattr(_torch, "compiled", fail)
    x = leaf(1.0, 2.0)
    fallen_back(lambda: FoMoH([x], compile=True).step(lambda: x.square().sum()), "KeyError: 'no such kernel")
    fallen_back(lambda: jp.compile(jp.quadratic)(torch.sum, x.detach(), torch.eye(2, dtype=F64)), "KeyError")


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


def flat(result: Any) -> list[Tensor]:
    parts = (result.loss, result.slope, result.curvature) if isinstance(result, jp.Quadratic) else result
    return _torch.pytree.tree_leaves(list(parts) if isinstance(parts, tuple) else vars(parts))


@pytest.mark.usefixtures("traced")
def test_a_compiled_quadratic_is_the_eager_one(captures: Captures) -> None:
    fast, model = jp.compile(jp.quadratic), built(mlp)
    x, y = batches("mlp")
    values = {name: p.detach() for name, p in model.named_parameters()}
    for one, target in zip(x, y, strict=True):  # primals, directions and what the function captures are inputs

        def loss(values: dict[str, Tensor], one: Tensor = one, target: Tensor = target) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model, values, (one,)), target)

        values = {name: p + 0.1 for name, p in values.items()}
        directions = {name: torch.randn(3, *p.shape, dtype=F64) for name, p in values.items()}
        before = copy.deepcopy(model.state_dict())
        expected = jp.quadratic(loss, values, directions)
        once = copy.deepcopy(model.state_dict())
        model.load_state_dict(before)
        assert_close(flat(fast(loss, values, directions)), flat(expected))
        assert_close(model.state_dict(), once)  # the statistics were written
    assert captures.count == 1
    wider = {name: torch.cat([rows, rows]) for name, rows in directions.items()}
    assert fast(loss, values, wider).slope.shape == (6,)
    assert captures.count == 2
    model.eval()
    assert_close(flat(fast(loss, values, directions)), flat(jp.quadratic(loss, values, directions)))
    assert captures.count == 3


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("pairs", ["all", "diagonal", "star", "laplacian", "none", jp.PairSet(3, ((0, 2),))], ids=str)
def test_a_compiled_jet_is_the_eager_one(pairs: Any) -> None:
    a, b, c = (torch.randn(2, 3, dtype=F64) for _ in range(3))
    directions = tuple(torch.randn(3, 2, 3, dtype=F64) for _ in range(2))

    def func(x: Tensor, y: Tensor) -> Any:
        both = (x * y).sin() * c
        return {"both": both, "more": [both @ both.T, x, (torch.ones(2), both > 0)]}, both.sum()

    expected = jp.jet(func, (a, b), directions, pairs)
    found = jp.compile(jp.jet)(func, (a, b), directions, pairs)
    for part in ("primal", "tangent", "second"):
        assert_close(getattr(found, part), getattr(expected, part))


@pytest.mark.usefixtures("traced")
def test_aux_lazy_directions_and_primals_that_are_captured_too() -> None:
    x = torch.tensor([1.0, 2.0], dtype=F64)

    class Half:
        k = 2

        def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
            return torch.eye(2, dtype=like.dtype)[start:stop] / 2

    def func(y: Tensor) -> Any:
        y.mul_(2)  # the caller's tensor stays
        return (y**2 * x).sum(), {"x": x, "y": y, "name": "a"}

    for transform in (jp.quadratic, jp.jet):
        expected, aux = transform(func, x, Half(), has_aux=True)
        found, more = jp.compile(transform)(func, x, Half(), has_aux=True)
        assert_close(flat(found), flat(expected))
        assert_close([more["x"], more["y"]], [aux["x"], aux["y"]])
        assert more["name"] == "a"
    assert torch.equal(x, torch.tensor([1.0, 2.0], dtype=F64))


@pytest.mark.usefixtures("traced")
def test_a_program_that_cannot_be_captured_is_run_as_it_is_with_one_warning() -> None:
    x, rows = torch.tensor([1.0, 2.0], dtype=F64), torch.eye(2, dtype=F64)

    def func(x: Tensor) -> Tensor:
        return (x**3).sum() if float(x.sum()) > 0 else x.sum()

    fast = jp.compile(jp.quadratic)
    fallen_back(lambda: fast(func, x, rows), "func cannot be compiled and is run as it is: ")
    for directions in (rows, rows[:1]):  # another signature, but the same word
        assert_close(flat(fast(func, x, directions)), flat(jp.quadratic(func, x, directions)))


@pytest.mark.usefixtures("traced")
def test_what_is_to_be_differentiated_is_not_compiled() -> None:
    x, w = torch.tensor([1.0, 2.0], dtype=F64), leaf(3.0, 4.0)
    rows = torch.eye(2, dtype=F64)
    for func, primal in ((lambda x: (w * x**3).sum(), x), (lambda w: (w**3).sum(), w)):
        w.grad, fast = None, jp.compile(jp.quadratic)
        fallen_back(functools.partial(differentiated, fast, func, primal, rows), "constant to autograd; expected torch")
        assert w.grad is not None
        with torch.no_grad():
            assert_close(fast(func, primal, rows).curvature, jp.quadratic(func, primal, rows).curvature)
            assert not fast(func, primal, rows).curvature.requires_grad


def differentiated(fast: Any, func: Any, primal: Tensor, rows: Tensor) -> None:
    fast(func, primal, rows).curvature.sum().backward()


@pytest.mark.usefixtures("traced")
def test_what_a_compiled_transform_refuses() -> None:
    x, rows = torch.ones(2), torch.eye(2)
    fast, jets = jp.compile(jp.quadratic), jp.compile(jp.jet)
    with pytest.raises(ValueError, match=r"hessian cannot be compiled; expected jetplane.quadratic or jetplane.jet"):
        jp.compile(jp.hessian)
    with pytest.raises(ValueError, match="int cannot be compiled"):
        jp.compile(3)  # type: ignore[arg-type]
    for one in (fast, jets):
        with pytest.raises(ValueError, match="chunk_size is 1, which needs several passes; expected None"):
            one(torch.sum, x, rows, chunk_size=1)
        with pytest.raises(ValueError, match=r"directions for the primal \(2,\) have shape \(2, 3\)"):
            one(torch.sum, x, torch.ones(2, 3))
        with pytest.raises(ValueError, match="directions have the structure"):
            one(torch.sum, x, (rows, rows))
        with pytest.raises(TypeError, match="directions for the primal are float"):
            one(torch.sum, x, 1.0)
        with pytest.raises(TypeError, match="func is int"):
            one(3, x, rows)
        for _ in range(2):
            with pytest.raises(ValueError, match="hold values that are not finite"):
                one(torch.sum, x, rows / 0)
            one(torch.sum, x, rows)
    with pytest.raises(TypeError, match=r"the program returned float 3.0; expected a tensor"):
        jets(lambda x: (x.sum(), 3.0), x, rows)
    with (
        pytest.warns(UserWarning, match="is run as it is"),
        pytest.raises(ValueError, match=r"the loss has shape \(2,"),
    ):
        fast(lambda x: x * 2, x, rows)


@pytest.mark.usefixtures("traced")
def test_the_number_of_signatures_that_are_kept_is_bounded(monkeypatch: pytest.MonkeyPatch, captures: Captures) -> None:
    monkeypatch.setattr("jetplane.ad.compile._KEPT", 2)
    fast = jp.compile(jp.jet)
    x = torch.ones(2)
    for k, count in ((1, 1), (2, 2), (1, 2), (3, 3), (1, 3), (2, 4)):
        fast(torch.sin, x, torch.ones(k, 2))
        assert captures.count == count


# -- the layouts of CUDA, on the CPU ----------------------------------------------------------------------------------


LAYOUTS = [  # stride, padding, dilation, groups, channels, size of the kernel
    ([1, 1], [0, 0], [1, 1], 1, 1, (5, 5)),
    ([2, 1], [0, 0], [1, 1], 1, 2, (3, 2)),
    ([2, 2], [1, 2], [1, 1], 1, 2, (3, 3)),
    ([1, 1], [0, 0], [2, 1], 1, 2, (3, 3)),
    ([1, 2], [1, 1], [1, 1], 2, 4, (3, 3)),
]


@pytest.mark.parametrize(("stride", "padding", "dilation", "groups", "channels", "size"), LAYOUTS)
def test_a_joint_convolution_is_one_of_each_pair(
    monkeypatch: pytest.MonkeyPatch,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    channels: int,
    size: tuple[int, int],
) -> None:
    lifted = Convolution(stride, padding, dilation, False, [0, 0], groups)
    x, w = torch.randn(3, 2, channels, 9, 8, dtype=F64), torch.randn(2, 6, channels // groups, *size, dtype=F64)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    expected = torch.stack([torch.stack([F.conv2d(one, other, **options) for other in w]) for one in x])
    assert_close(lifted.joint(x, w), expected)
    last = torch.channels_last
    wide = lifted(x.flatten(0, 1).contiguous(memory_format=last), lifted._wide(w).contiguous(memory_format=last))
    assert_close(wide, lifted(x.flatten(0, 1), lifted._wide(w)))
    if groups == 1 and not any(padding) and set(dilation) == {1}:
        monkeypatch.setattr(Convolution, "_laid_out", Convolution._as_matrices)
        assert_close(lifted.joint(x, w), expected)


def test_a_joint_product_of_matrices_is_one_of_each_pair() -> None:
    for shapes in (((3, 4, 5), (2, 5, 6)), ((3, 7, 4, 5), (2, 7, 5, 6))):
        a, b = (torch.randn(shape, dtype=F64) for shape in shapes)
        expected = torch.stack([torch.stack([one @ other for other in b]) for one in a])
        assert_close(MatMul().joint(a, b), expected)


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


def test_inputs_that_are_one_tensor_are_left_to_autograds_layers() -> None:
    x = torch.tensor([1.0, 2.0])
    run, written = _torch.compiled(lambda tensors: [tensors[0] * 3 + tensors[1]], [x, x])
    assert (run([x, x])[0].tolist(), written) == ([4.0, 8.0], set())


@pytest.mark.slow
def test_a_network_through_the_compiler() -> None:
    x, y = batches("mlp")
    eager, fast = built(mlp), built(mlp)
    FoMoHKD(eager.parameters(), 0.05, k=3).steps(cross_entropy(eager), x, y)
    FoMoHKD(fast.parameters(), 0.05, k=3, compile=True).steps(cross_entropy(fast), x, y)
    assert_close(fast.state_dict(), eager.state_dict(), 1e-10)


@pytest.mark.slow
def test_a_plane_through_the_compiler() -> None:
    fast, w = jp.compile(jp.quadratic), torch.randn(4, dtype=F64)

    def func(x: Tensor) -> Tensor:
        return (w * x.tanh()).sum().exp()

    for _ in range(2):
        x, rows = torch.randn(4, dtype=F64), torch.randn(3, 4, dtype=F64)
        assert_close(flat(fast(func, x, rows)), flat(jp.quadratic(func, x, rows)))


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
def test_more_directions_than_are_compared_at_a_time(pairs: str) -> None:
    x, directions = torch.randn(3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)

    def func(x: Tensor) -> Tensor:
        return x.sin() * x.prod()

    found, expected = jp.compile(jp.jet)(func, x, directions, pairs), jp.jet(func, x, directions, pairs)
    for part in ("primal", "tangent", "second"):
        torch.testing.assert_close(getattr(found, part), getattr(expected, part))


def test_a_late_plane_of_many_directions() -> None:
    model, x = torch.nn.Linear(4, 3).double(), torch.randn(5, 4, dtype=torch.float64)
    params = {name: value.detach() for name, value in model.named_parameters()}
    directions = {name: torch.randn(9, *value.shape, dtype=torch.float64) for name, value in params.items()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, params, (x,)), torch.arange(5) % 3)

    found = jp.compile(jp.quadratic)(loss, params, directions, curvature="ggn")
    expected = jp.quadratic(loss, params, directions)  # the model is linear
    torch.testing.assert_close(found.curvature, expected.curvature)


# -- torch's compiler -------------------------------------------------------------------------------------------------


def test_a_warning_of_the_compiler_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here warnings are errors: a program would be run as it is for nothing but advice."""
    from torch._inductor import compile_fx

    original = compile_fx.compile_fx

    def advising(*args: Any, **options: Any) -> Any:
        warnings.warn("online softmax\n is disabled", UserWarning, stacklevel=1)
        return original(*args, **options)

    monkeypatch.setattr(compile_fx, "compile_fx", advising)
    x, fast = torch.randn(3), jp.compile(jp.quadratic)
    with caplog.at_level(logging.INFO, "jetplane"):
        found = fast(lambda x: x.sin().prod(), x, torch.eye(3))
    torch.testing.assert_close(found.curvature, jp.quadratic(lambda x: x.sin().prod(), x, torch.eye(3)).curvature)
    assert "torch's compiler: online softmax is disabled" in caplog.messages
