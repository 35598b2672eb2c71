"""The optimizers: the paper's formulas, the manners of torch.optim, and steps that are safe."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from cases import F64, assert_close
from jetplane.ad.run.directions import Directions
from jetplane.curvature import ExactHessian, NoCurvature
from jetplane.directions import Coordinate, Fixed, Gaussian, Plane
from jetplane.errors import OptimizationStalled
from jetplane.optim import (
    FGD,
    Acceptance,
    FoMoH,
    FoMoHBP,
    FoMoHKD,
    GaussNewtonSearch,
    HorizonAdam,
    HyperplaneSearch,
    Newton,
)
from jetplane.solvers import (
    AbsoluteCurvature,
    Cubic,
    Damped,
    JitteredInverse,
    NegativeSlope,
    Solver,
    Status,
    TrustRegion,
)
from stepping import (
    METHODS,
    P,
    Q,
    X,
    Y,
    another_device,
    derivatives,
    drawn,
    fit,
    leaf,
    network,
    noisy,
    params,
    rosenbrock,
)

# -- problems -------------------------------------------------------------------------------------------------------


# -- the formulas ---------------------------------------------------------------------------------------------------


def test_samples_are_averaged() -> None:
    model = network()
    leaves, before = list(model.parameters()), params(model)
    gradient, hessian = derivatives(fit(model), leaves)
    update = torch.zeros_like(before)
    for sample in range(3):
        v = drawn(Gaussian(2), leaves, sample=sample)
        update -= torch.linalg.solve(v @ hessian @ v.T, v @ gradient) @ v / 3
    opt = FoMoHKD(leaves, k=2, samples=3)
    opt.step(fit(model))
    assert_close(params(model), before + update, 1e-9)
    assert opt.report.slope.shape == (3, 2) and opt.report.curvature.shape == (3, 2, 2)
    assert opt.report.coefficients.shape == (3, 2) and opt.report.predicted.shape == ()


# -- groups, schedulers, batches ------------------------------------------------------------------------------------


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, 2, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=8, cycle_momentum=False),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
}


def test_all_schedulers_are_tried() -> None:
    assert set(SCHEDULERS) == set(lr_scheduler.__all__) - {"LRScheduler"}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("lr", [0.4, torch.tensor(0.4)], ids=["float", "tensor"])
def test_schedulers(name: str, lr: float | Tensor) -> None:
    x = leaf(3.0, -2.0)
    opt = FoMoHKD([x], lr=lr.clone() if isinstance(lr, Tensor) else lr, k=2)
    scheduler = SCHEDULERS[name](opt)
    rates = []
    for _ in range(5):
        before, rate = x.detach().clone(), float(opt.param_groups[0]["lr"])
        loss = opt.step(lambda: x.square().sum())
        assert_close(x.detach(), (1 - rate) * before, 1e-9)  # the plane is the whole space
        scheduler.step(loss) if name == "ReduceLROnPlateau" else scheduler.step()
        rates.append(rate)
    assert len(set(rates)) > 1


# -- random numbers and buffers -------------------------------------------------------------------------------------

REPEATED = {
    "once": {},
    "chunks": {"chunk_size": 1},
    "samples": {"samples": 3},
    "accepted": {"accept": Acceptance(backtracks=3)},
    "all": {"chunk_size": 2, "samples": 2, "accept": Acceptance(backtracks=2, fraction=0.9)},
}


@pytest.mark.parametrize("options", REPEATED.values(), ids=REPEATED)
@pytest.mark.parametrize("method", [FGD, FoMoH, FoMoHBP, FoMoHKD])
def test_dropout_and_batch_norm_once_per_step(method: type[HyperplaneSearch], options: dict) -> None:
    model, twin = noisy(), noisy()
    opt = method(model.parameters(), patience=None, **options)
    for seed in range(2):
        twin.load_state_dict(model.state_dict())
        torch.manual_seed(seed)
        expected = fit(twin)()
        left = torch.get_rng_state()
        torch.manual_seed(seed)
        loss = opt.step(fit(model))
        assert torch.equal(torch.get_rng_state(), left)
        assert_close(loss, expected)
        for (name, buffer), other in zip(model.named_buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(buffer, other, rtol=1e-12, atol=1e-12, msg=name)


def test_fomoh_bp_sees_one_dropout_mask() -> None:
    model, twin = noisy(), noisy()
    leaves = list(twin.parameters())
    torch.manual_seed(5)
    g, hessian = derivatives(fit(twin), leaves)
    torch.manual_seed(5)
    before = params(model)
    FoMoHBP(model.parameters()).step(fit(model))
    assert_close(params(model), before - (g @ g) / ((g @ hessian @ g).abs() + 1e-5) * g, 1e-9)


@pytest.mark.parametrize("method", [FGD, FoMoH, FoMoHBP, FoMoHKD])
def test_one_seed_one_run(method: type[HyperplaneSearch]) -> None:
    results = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        model = network()
        opt = method(model.parameters(), seed=9, samples=2)
        for _ in range(4):
            opt.step(fit(model))
        assert torch.equal(torch.get_rng_state(), before)
        results.append(params(model))
    assert torch.equal(*results)
    other = network()
    opt = method(other.parameters(), seed=10, samples=2)
    for _ in range(4):
        opt.step(fit(other))
    assert torch.equal(params(other), results[0]) == (method is FoMoHBP)


@pytest.mark.parametrize("solver", [JitteredInverse(), TrustRegion(0.1), Damped(), Cubic()], ids=str)
def test_state_dict_continues_bit_by_bit(solver: Solver) -> None:
    def start() -> tuple[Tensor, HyperplaneSearch]:
        x = leaf(-1.2, 1.0, 0.5)
        return x, FoMoHKD([x], k=2, seed=3, solver=solver, patience=None)

    x, opt = start()
    for _ in range(6):
        opt.step(lambda: rosenbrock(x))
    buffer = io.BytesIO()
    torch.save({"x": x.detach(), "opt": opt.state_dict()}, buffer)
    for _ in range(6):
        opt.step(lambda: rosenbrock(x))

    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    y, again = start()
    y.data.copy_(saved["x"])
    again.load_state_dict(saved["opt"])
    for _ in range(6):
        again.step(lambda: rosenbrock(y))
    assert torch.equal(x, y)
    assert again.state_dict() == opt.state_dict()
    numbers = [value for name, value in opt.param_groups[0].items() if name != "params"]
    assert all(value is None or isinstance(value, int | float) for value in numbers)


def test_a_copy_goes_on_alone() -> None:
    x = leaf(-1.2, 1.0)
    opt = Newton([x])
    twin = copy.deepcopy(opt)
    (y,) = twin.param_groups[0]["params"]
    opt.step(lambda: rosenbrock(x))
    twin.step(lambda: rosenbrock(y))
    assert torch.equal(x, y) and x is not y


# -- safe steps -----------------------------------------------------------------------------------------------------


def nan_loss(x: Tensor) -> Tensor:
    return x.sum() * float("nan")


def infinite_slope(x: Tensor) -> Tensor:
    return (x - x.detach()).abs().sqrt().sum()


@pytest.mark.parametrize("loss", [nan_loss, infinite_slope, lambda x: (x * 1e308).square().sum()])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_what_is_not_finite_moves_nothing(method: type[HyperplaneSearch], loss: Callable[[Tensor], Tensor]) -> None:
    x = leaf(0.1, 0.2)
    opt = method([x], weight_decay=0.5)
    opt.step(lambda: loss(x))
    assert torch.equal(x.detach(), torch.tensor([0.1, 0.2], dtype=F64))
    assert opt.report.status is Status.NONFINITE
    assert opt.param_groups[0]["step"] == 1


def test_an_update_that_overflows_moves_nothing() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    opt = FGD([x], lr=1e38)
    opt.step(lambda: 1e3 * x.square().sum())
    assert x.tolist() == [1.0, 2.0] and opt.report.status is Status.NONFINITE
    assert torch.isfinite(opt.report.coefficients).all()


def test_a_sum_that_overflows_moves_nothing() -> None:
    most = torch.finfo(torch.float32).max
    x = torch.tensor([most, 1.0], requires_grad=True)
    opt = HyperplaneSearch([x], 1.0, Fixed([torch.ones(1, 2)]), NoCurvature(), lambda model: _step(model, most))
    opt.step(lambda: x.sum() / most)
    assert x.tolist() == [most, 1.0] and opt.report.status is Status.NONFINITE


def _step(model, size: float):
    return NegativeSlope()(model)._replace(coefficients=torch.full((1,), size))


@pytest.mark.parametrize(
    ("loss", "method", "status"),
    [
        (lambda x: 0 * x.sum(), FoMoH, Status.FLAT),
        (lambda x: x.sum(), lambda p: FoMoH(p, solver=AbsoluteCurvature(eps=0.0)), Status.SINGULAR),
        (lambda x: x.sum(), lambda p: FoMoHKD(p, solver=JitteredInverse(tries=1)), Status.SINGULAR),
    ],
    ids=["no-slope", "no-curvature", "singular"],
)
def test_the_status_says_why(loss: Callable, method: Callable, status: Status) -> None:
    x = leaf(1.0, 2.0)
    opt = method([x])
    opt.step(lambda: loss(x))
    assert opt.report.status is status and x.tolist() == [1.0, 2.0]
    assert opt.report.actual is None and all(part is not None for part in opt.report[:5])


def test_patience() -> None:
    x = leaf(1.0, 2.0)
    opt = FoMoH([x], patience=3)

    def bad() -> Tensor:
        return nan_loss(x)

    opt.step(bad), opt.step(bad)
    opt.step(lambda: x.square().sum())  # starts the count anew
    opt.step(bad), opt.step(bad)
    message = (
        "3 steps in a row did not move the parameters, the last with status NONFINITE: the loss, slope, curvature or "
        "step is not finite. Look whether the loss is finite at the parameters as they are; if it is, take a smaller "
        "lr. With patience=None nothing is raised."
    )
    with pytest.raises(OptimizationStalled, match=f"^{re.escape(message)}$"):
        opt.step(bad)
    assert opt.report.status is Status.NONFINITE
    never = FoMoH([x], patience=None)
    for _ in range(20):
        never.step(bad)


@pytest.mark.parametrize("method", [FoMoH, FoMoHKD, FoMoHBP, FGD, Newton])
def test_to_have_converged_is_no_error(method: Callable) -> None:
    x = leaf(0.0, 0.0)
    opt = method([x], patience=1)
    for _ in range(20):
        opt.step(lambda: x.square().sum())
        assert opt.report.status is Status.FLAT and opt.param_groups[0]["bad"] == 0
    opt.step(lambda: (x - 1).square().sum())  # and it goes on where there is something to do
    assert opt.report.status is Status.OK


def test_an_exact_minimum_is_reached_and_kept() -> None:
    x = leaf(-1.2, 1.0)
    opt = FoMoHKD([x], k=2)
    losses = [float(opt.step(lambda: rosenbrock(x))) for _ in range(40)]
    assert losses[-1] == 0.0 and x.tolist() == [1.0, 1.0] and opt.report.status is Status.FLAT


def test_singular_planes_in_a_row_say_what_to_do() -> None:
    x = leaf(1.0, 2.0)
    opt = FoMoHKD([x], k=2, solver=JitteredInverse(tries=1), patience=2)
    opt.step(lambda: x.sum())
    with pytest.raises(OptimizationStalled, match=r"status SINGULAR: the curvature is singular.*Take fewer directions"):
        opt.step(lambda: x.sum())


def test_rejected_steps_warn_once_and_never_raise() -> None:
    x = leaf(1.0)
    opt = FoMoH([x], lr=1e6, accept=Acceptance(), patience=3)

    def step() -> None:
        opt.step(lambda: x.square().sum())
        assert opt.report.status is Status.REJECTED

    step(), step()
    with pytest.warns(
        UserWarning, match=r"3 steps in a row .* status REJECTED: the step did not .* a smaller lr, or A"
    ):
        step()
    for _ in range(6):
        step()


def test_a_solver_that_adapts_may_have_many_steps_rejected() -> None:
    x = leaf(-1.2, 1.0)
    opt = FoMoHKD([x], k=2, solver=Cubic(1e-12), accept=Acceptance(fraction=0.1), patience=1)
    for _ in range(200):
        loss = opt.step(lambda: rosenbrock(x))
    assert float(loss) < 1e-12


def test_adaptive_solvers_follow_the_model() -> None:
    x = leaf(-1.2, 1.0)
    opt = FoMoHKD([x], k=2, solver=TrustRegion(0.05), accept=Acceptance(), patience=None)
    radii, losses = [], []
    for _ in range(25):
        losses.append(float(opt.step(lambda: rosenbrock(x))))
        radii.append(opt.param_groups[0]["solver_state"])
        assert opt.report.actual is not None
    assert len(set(radii)) > 3 and losses == sorted(losses, reverse=True)


def test_an_adaptive_solver_survives_a_loss_that_is_not_finite_beyond() -> None:
    x = leaf(1.0)
    opt = HyperplaneSearch([x], 1.0, Coordinate(), NoCurvature(), TrustRegion(4.0))
    for _ in range(2):
        opt.step(lambda: x.log().sum())
    assert opt.param_groups[0]["solver_state"] == 0.25
    assert x.tolist() == [1.0] and opt.report.status is Status.REJECTED


# -- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_maximize_mirrors(method: type[HyperplaneSearch]) -> None:
    a, b = leaf(0.3, 0.4), leaf(0.3, 0.4)
    down, up = method([a], accept=Acceptance()), method([b], maximize=True, accept=Acceptance())
    down.step(lambda: rosenbrock(a))
    loss = up.step(lambda: -rosenbrock(b))
    assert_close(b.detach(), a.detach(), 1e-12)
    assert float(loss) < 0
    turned = 1 if method is FoMoHBP else -1  # its direction, the gradient, turns with the loss
    assert_close(up.report.slope, turned * down.report.slope)
    assert_close(up.report.curvature, -down.report.curvature)
    assert_close(up.report.predicted, down.report.predicted)
    assert up.report.status is down.report.status
    assert up.report.actual is not None and down.report.actual is not None
    assert_close(up.report.actual, down.report.actual)


def test_weight_decay_is_decoupled() -> None:
    plain, decayed = network(), network()
    before = params(plain)
    FoMoH(plain.parameters(), lr=0.5).step(fit(plain))
    FoMoH(decayed.parameters(), lr=0.5, weight_decay=0.1).step(fit(decayed))
    assert_close(params(decayed), params(plain) - 0.5 * 0.1 * before)


def test_existing_gradients_are_left_alone() -> None:
    x = leaf(1.0, 2.0)
    x.grad = torch.ones(2, dtype=F64)
    FoMoHBP([x]).step(lambda: rosenbrock(x))
    assert x.grad is not None and x.grad.tolist() == [1.0, 1.0]


def test_derivatives_inside_the_closure() -> None:
    x = leaf(1.0, 2.0)

    def closure() -> Tensor:
        with torch.enable_grad():
            z = torch.linspace(0, 1, 5, dtype=F64, requires_grad=True)
            (slope,) = torch.autograd.grad((x[0] * z**2 + x[1] * z).sum(), z, create_graph=True)
        return (slope - 1).square().mean()

    Newton([x]).step(closure)
    assert_close(x.detach(), torch.tensor([0.0, 1.0], dtype=F64), 1e-9)


@pytest.mark.parametrize("method", [FGD, FoMoHBP])
def test_the_loss_may_be_a_parameter(method: type[HyperplaneSearch]) -> None:
    x = torch.tensor(2.0, requires_grad=True)
    opt = method([x])
    assert float(opt.step(lambda: x)) == float(opt.report.loss) == 2.0 != float(x.detach())


def test_short_dtypes_and_empty_tensors() -> None:
    a, b, c = (torch.ones(2, dtype=dtype, requires_grad=True) for dtype in (torch.bfloat16, torch.float32, F64))
    empty = torch.zeros(0, requires_grad=True)
    opt = FoMoH([a, b, c, empty], lr=0.1, accept=Acceptance(5), clip=10.0)
    losses = [
        float(opt.step(lambda: sum((t.double() - 3).square().sum() for t in (a, b, c, empty)))) for _ in range(30)
    ]
    assert losses[-1] < losses[0] / 2 and opt.report.status is Status.OK


@pytest.mark.parametrize("method", [FoMoH, FoMoHBP])
def test_under_autocast_every_trial_sees_its_own_weights(method: type[HyperplaneSearch]) -> None:
    model = network().float()
    data = X.float(), Y.float()
    opt = method(model.parameters(), lr=0.5, accept=Acceptance(5))
    with torch.autocast("cpu", torch.bfloat16):
        loss = opt.step(lambda x, y: (model(x) - y).float().square().mean(), *data)
        after = (model(data[0]) - data[1]).float().square().mean()
    assert opt.report.actual is not None and opt.report.status is Status.OK
    torch.testing.assert_close(loss - after.detach(), opt.report.actual)


def test_under_inference_mode() -> None:
    one, two = network(), network()
    FoMoHBP(one.parameters()).step(fit(one))
    opt = FoMoHBP(two.parameters())
    with torch.inference_mode():
        opt.step(fit(two))
    assert_close(params(two), params(one))


def test_a_backward_pass_needs_a_graph() -> None:
    opt = FoMoHBP([P])
    with pytest.raises(ValueError, match="the loss has no graph for the backward pass, though it uses the parameters"):
        opt.step(lambda: (P * 2).argmax().double())
    with pytest.raises(ValueError, match="detaches its result from all that varies"):
        opt.step(lambda: P.square().sum().detach())
    with pytest.raises(ValueError, match=r"computes its result under its own torch\.no_grad\(\)"):
        opt.step(torch.no_grad()(lambda: P.square().sum()))
    assert P.tolist() == [1.0, 1.0, 1.0]


def test_named_parameters_and_hooks() -> None:
    model, seen = network(), []
    opt = FoMoH(model.named_parameters())
    opt.register_step_post_hook(lambda *_: seen.append(opt.report.status))
    opt.step(fit(model))
    opt.zero_grad()
    assert seen == [Status.OK]


# -- bad input ------------------------------------------------------------------------------------------------------


PAIR = torch.tensor([1.0, 2.0])


def build(**options: object) -> HyperplaneSearch:
    return HyperplaneSearch([P], 1.0, Gaussian(1), ExactHessian(), JitteredInverse(), **options)


CONSTRUCTION: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    ("k-zero", lambda: FoMoHKD([P], k=0), ValueError, "k is 0; expected at least one direction"),
    ("k-negative", lambda: FGD([P], k=-1), ValueError, "k is -1; expected at least one direction"),
    ("k-large", lambda: FoMoHKD([P], k=4), ValueError, "k is 4, but the parameters have 3 entries; expected at most"),
    ("lr-negative", lambda: FoMoH([P], lr=-1.0), ValueError, "lr is -1.0; expected a finite number that is not neg"),
    ("lr-nan", lambda: FoMoH([P], lr=float("nan")), ValueError, "lr is nan; expected a finite number"),
    ("bare", lambda: FoMoH(P), TypeError, r"params is a tensor of shape \(3,\); expected a list of parameters, as \["),
    ("bare-ggn", lambda: GaussNewtonSearch(P), TypeError, r"params is a tensor of shape \(3,\); expected a list of"),
    ("bare-horizon", lambda: HorizonAdam(P), TypeError, r"params is a tensor of shape \(3,\); expected a list of"),
    (
        "module",
        lambda: GaussNewtonSearch(nn.Linear(1, 1)),
        TypeError,
        "params is Linear; expected parameters, as those of m",
    ),
    (
        "lr-pair",
        lambda: FoMoH([P], lr=PAIR),
        TypeError,
        r"lr is tensor\(\[1., 2.\]\); expected a number, or a tensor of",
    ),
    (
        "lr-pair-horizon",
        lambda: HorizonAdam([P], lr=PAIR),
        TypeError,
        r"lr is tensor\(\[1., 2.\]\); expected a number, or",
    ),
    (
        "lr-pair-group",
        lambda: HorizonAdam([{"params": [P], "lr": PAIR}]),
        TypeError,
        r"lr is tensor\(\[1., 2.\]\); expected a number, or a tensor of one element",
    ),
    (
        "decay-pair",
        lambda: build(weight_decay=PAIR),
        TypeError,
        r"weight_decay is tensor\(\[1., 2.\]\); expected a numb",
    ),
    ("lr-text-horizon", lambda: HorizonAdam([P], lr="fast"), TypeError, "lr is 'fast'; expected a number, or a tensor"),
    ("lr-text", lambda: FoMoH([P], lr="fast"), TypeError, "lr is 'fast'; expected a number"),
    (
        "lr-of-a-group",
        lambda: FoMoH([{"params": [P], "lr": -2.0}]),
        ValueError,
        "lr is -2.0; expected a finite number that is not negative",
    ),
    ("decay", lambda: build(weight_decay=-0.1), ValueError, "weight_decay is -0.1; expected a finite number"),
    ("empty", lambda: FoMoH([]), ValueError, "the parameter list is empty; expected at least one tensor"),
    ("twice", lambda: FoMoH([P, Q, P]), ValueError, "parameter 2 is in the parameter list already; expected each"),
    (
        "twice-in-groups",
        lambda: FoMoH([{"params": [P]}, {"params": [Q, P]}]),
        ValueError,
        "parameter 1 is in another group already; expected each parameter once",
    ),
    (
        "device",
        lambda: FoMoH([P, another_device()]),
        ValueError,
        "parameter 1 is on meta and parameter 0 on cpu; expected all parameters on one device",
    ),
    (
        "meta",
        lambda: FoMoH([another_device()]).step(lambda: P.sum()),
        ValueError,
        "parameter 0 is on meta, where there are no numbers; expected it on another device.",
    ),
    (
        "integers",
        lambda: FoMoH([torch.arange(3)]),
        TypeError,
        "parameter 0 has dtype torch.int64; only floating-point tensors can be perturbed",
    ),
    ("seed", lambda: build(seed=-1), ValueError, "seed is -1; expected a whole number from 0 to"),
    ("seed-float", lambda: build(seed=0.5), TypeError, "seed is 0.5; expected a whole number"),
    ("samples", lambda: build(samples=0), ValueError, "samples is 0; expected a whole number from 1"),
    ("clip", lambda: build(clip=0.0), ValueError, "clip is 0.0; expected a positive length or None"),
    ("patience", lambda: build(patience=0), ValueError, "patience is 0; expected a whole number from 1"),
    ("chunks", lambda: build(chunk_size=0), ValueError, "chunk_size is 0; expected a whole number from 1"),
    ("accept", lambda: build(accept=True), TypeError, "accept is bool; expected an Acceptance, None or False"),
    ("backtracks", lambda: Acceptance(backtracks=-1), ValueError, "backtracks is -1; expected a whole number from 0"),
    ("fraction", lambda: Acceptance(fraction=1.0), ValueError, "fraction is 1.0; expected a number from 0, below 1"),
    (
        "directions",
        lambda: HyperplaneSearch([P], 1.0, 3, ExactHessian(), JitteredInverse()),
        TypeError,
        r"directions are int; expected a family of directions such as Gaussian\(k\)",
    ),
    (
        "curvature",
        lambda: HyperplaneSearch([P], 1.0, Gaussian(1), 3, JitteredInverse()),
        TypeError,
        r"curvature is int; expected ExactHessian\(\), GaussNewton\(\)",
    ),
    (
        "solver",
        lambda: HyperplaneSearch([P], 1.0, Gaussian(1), ExactHessian(), "newton"),
        TypeError,
        r"solver is str; expected a solver such as JitteredInverse\(\)",
    ),
    (
        "newton",
        lambda: Newton([torch.ones(2001, requires_grad=True)]),
        ValueError,
        "the parameters have 2001 entries, and Newton computes their whole Hessian; expected at most 2000, a larger",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), [r[1:] for r in CONSTRUCTION], ids=[r[0] for r in CONSTRUCTION])
def test_bad_construction(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_scheduler_that_goes_astray() -> None:
    opt = FoMoH([P])
    opt.param_groups[0]["lr"] = float("inf")
    with pytest.raises(ValueError, match="lr is inf; expected a finite number that is not negative"):
        opt.step(lambda: P.sum())


def test_directions_of_a_wrong_kind() -> None:
    class Wrong:
        def count(self, leaves: Sequence[Tensor]) -> int:
            return 1

        def draw(self, plane: Plane) -> Directions:
            class Lazy:
                k = 1

                def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
                    return torch.ones(1, 7)

            return Lazy()

    opt = HyperplaneSearch([P], 1.0, Wrong(), ExactHessian(), JitteredInverse())
    with pytest.raises(ValueError, match=r"directions for parameter 0 are \(1, 7\) torch.float32 on cpu; expected"):
        opt.step(lambda: P.square().sum())
    assert P.tolist() == [1.0, 1.0, 1.0]


# -- what the closure returns beside its loss ---------------------------------------------------------------------


# -- inside torch.compile -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "reduction"),
    [
        (lambda p: FoMoHKD(p, k=2), "mean"),
        (FoMoHBP, "mean"),
        (lambda p: GaussNewtonSearch(p, k=2), "none"),
        (lambda p: HorizonAdam(p, samples=2), "none"),
    ],
    ids=["fomoh-kd", "fomoh-bp", "gauss-newton", "horizon"],
)
def test_a_step_inside_a_compiled_function_breaks_its_graph(make: Callable, reduction: str) -> None:
    torch.compiler.reset()
    found = []
    for compile in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2).double()
        opt = make(list(layer.parameters()))

        def train(x: Tensor, layer: nn.Module = layer, opt: HyperplaneSearch = opt) -> Tensor:
            target = 2 * x[:, :2]

            def closure() -> Tensor:
                losses = F.mse_loss(layer(x), target, reduction="none").mean(1)
                return losses.mean() if reduction == "mean" else losses

            return opt.step(closure) + 1

        run = torch.compile(train, backend="eager") if compile else train
        found.append([*(run(X) for _ in range(3)), *layer.parameters()])
    assert all(map(torch.equal, *found))
