"""The optimizers: the paper's formulas, the manners of torch.optim, and steps that are safe."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from cases import F64, assert_close, randn
from jetplane.ad.directions import Directions
from jetplane.curvature import ExactHessian, NoCurvature
from jetplane.directions import Coordinate, Family, Fixed, Gaussian, Gradient, Orthonormal, Plane, Rademacher, Sphere
from jetplane.errors import OptimizationStalled
from jetplane.optim import FGD, Acceptance, FoMoH, FoMoHBP, FoMoHKD, HyperplaneSearch, Newton
from jetplane.solvers import (
    AbsoluteCurvature,
    Cubic,
    Damped,
    JitteredInverse,
    NegativeSlope,
    SaddleFree,
    Solver,
    Status,
    TrustRegion,
)

X = torch.sin(torch.arange(24, dtype=F64) ** 2).reshape(8, 3)
Y = torch.linspace(0, 1, 8, dtype=F64).reshape(8, 1)


# -- problems -------------------------------------------------------------------------------------------------------


def leaf(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=F64, requires_grad=True)


def rosenbrock(x: Tensor) -> Tensor:
    return ((1 - x[:-1]) ** 2 + 100 * (x[1:] - x[:-1] ** 2) ** 2).sum()


def network() -> nn.Module:
    """A small smooth model with two layers, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def noisy() -> nn.Module:
    """A model with dropout and batch-norm."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 1)).double()


def fit(model: nn.Module) -> Callable[[], Tensor]:
    return lambda: (model(X) - Y).square().mean()


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def params(model: nn.Module) -> Tensor:
    return flat(list(model.parameters()))


def drawn(family: Family, leaves: Sequence[Tensor], seed: int = 0, step: int = 0, sample: int = 0) -> Tensor:
    """The directions of a step as a matrix (K, D)."""
    rows = family.draw(Plane(seed, step, sample, leaves, list))
    parts = [rows.rows(i, t.detach(), 0, rows.k).reshape(rows.k, -1) for i, t in enumerate(leaves)]
    return torch.cat(parts, 1)


def derivatives(closure: Callable[[], Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Gradient (D,) and Hessian (D, D) by double backward."""
    grads = torch.autograd.grad(closure(), leaves, create_graph=True)
    gradient = torch.cat([g.reshape(-1) for g in grads])
    rows = [torch.autograd.grad(entry, leaves, retain_graph=True, allow_unused=True) for entry in gradient]
    hessian = [
        torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in zip(r, leaves, strict=True)])
        for r in rows
    ]
    return gradient.detach(), torch.stack(hessian).detach()


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


# -- the formulas ---------------------------------------------------------------------------------------------------


def test_named_methods_only_compose() -> None:
    x = leaf(1.0, 2.0, 3.0)
    table = {
        FGD: (Gaussian(1), NoCurvature(), NegativeSlope()),
        FoMoH: (Gaussian(1), ExactHessian(), AbsoluteCurvature()),
        FoMoHBP: (Gradient(), ExactHessian(), AbsoluteCurvature()),
        FoMoHKD: (Gaussian(2), ExactHessian(), JitteredInverse()),
        Newton: (Coordinate(), ExactHessian(), JitteredInverse()),
    }
    for method, parts in table.items():
        opt = method([x])
        assert isinstance(opt, torch.optim.Optimizer)
        assert (opt.directions, opt.curvature, opt.solver) == parts


@pytest.mark.parametrize("family", [Gaussian(5), Rademacher(5), Sphere(5), Orthonormal(5), Coordinate()], ids=str)
def test_as_many_directions_as_dimensions_is_newton(family: Family) -> None:
    x = leaf(-0.3, 0.9, 0.4, -0.5, 0.2)
    assert torch.linalg.matrix_rank(drawn(family, [x], seed=2)) == 5
    gradient, hessian = derivatives(lambda: rosenbrock(x), [x])
    expected = x.detach() - torch.linalg.solve(hessian, gradient)
    HyperplaneSearch([x], 1.0, family, ExactHessian(), JitteredInverse(), seed=2).step(lambda: rosenbrock(x))
    assert_close(x.detach(), expected, 1e-9)


def test_newton_on_a_network() -> None:
    model = network()
    leaves, before = list(model.parameters()), params(model)
    gradient, hessian = derivatives(fit(model), leaves)
    opt = Newton(leaves, lr=0.5)
    opt.step(fit(model))
    assert_close(params(model), before - 0.5 * torch.linalg.solve(hessian, gradient), 1e-9)
    assert opt.report.slope.shape == (21,)


@pytest.mark.parametrize("solver", [JitteredInverse(), SaddleFree(), TrustRegion(1e3), Damped(1e-13)], ids=str)
def test_one_step_solves_a_convex_quadratic(solver: Solver) -> None:
    root = randn(6, 6)
    matrix, centre = root @ root.T + torch.eye(6, dtype=F64), randn(6)
    x = randn(6).requires_grad_()
    opt = HyperplaneSearch([x], 1.0, Gaussian(6), ExactHessian(), solver)
    opt.step(lambda: (x - centre) @ matrix @ (x - centre) / 2)
    assert_close(x.detach(), centre, 1e-9)
    assert_close(opt.report.predicted, opt.report.loss, 1e-9)


@pytest.mark.parametrize("lr", [1.0, 0.3])
def test_fomoh_against_autograd(lr: float) -> None:
    model = network()
    leaves = list(model.parameters())
    opt = FoMoH(leaves, lr=lr, seed=11)
    for step in range(3):
        before = params(model)
        gradient, hessian = derivatives(fit(model), leaves)
        v = drawn(Gaussian(1), leaves, seed=11, step=step)[0]
        kappa = -(v @ gradient) / ((v @ hessian @ v).abs() + 1e-5)
        opt.step(fit(model))
        assert_close(params(model), before + lr * kappa * v, 1e-10)
        assert_close(opt.report.coefficients, kappa.reshape(1), 1e-10)


@pytest.mark.parametrize("lr", [1.0, 0.3])
def test_fomoh_bp_against_autograd(lr: float) -> None:
    model = network()
    leaves = list(model.parameters())
    opt = FoMoHBP(leaves, lr=lr)
    for _ in range(3):
        before = params(model)
        g, hessian = derivatives(fit(model), leaves)
        opt.step(fit(model))
        assert_close(params(model), before - lr * (g @ g) / ((g @ hessian @ g).abs() + 1e-5) * g, 1e-10)
        assert opt.report.evaluations == 2
    assert all(p.grad is None for p in leaves)


@pytest.mark.parametrize("k", [1, 4])
def test_fgd_against_autograd(k: int) -> None:
    model = network()
    leaves, before = list(model.parameters()), params(model)
    gradient, _ = derivatives(fit(model), leaves)
    v = drawn(Gaussian(k), leaves)
    opt = FGD(leaves, lr=1e-2, k=k)
    opt.step(fit(model))
    assert_close(params(model), before - 1e-2 * (v @ gradient) @ v / k, 1e-10)
    assert_close(opt.report.curvature, torch.zeros(k, k, dtype=F64))


def test_fomoh_kd_against_autograd() -> None:
    model = network()
    leaves, before = list(model.parameters()), params(model)
    gradient, hessian = derivatives(fit(model), leaves)
    v = drawn(Gaussian(3), leaves)
    kappa = -torch.linalg.solve(v @ hessian @ v.T, v @ gradient)
    opt = FoMoHKD(leaves, lr=0.7, k=3)
    loss = opt.step(fit(model))
    assert_close(params(model), before + 0.7 * kappa @ v, 1e-9)
    report = opt.report
    assert_close(report.slope, v @ gradient)
    assert_close(report.curvature, v @ hessian @ v.T)
    c = 0.7 * kappa
    assert_close(report.predicted, -(report.slope @ c + c @ report.curvature @ c / 2), 1e-9)
    assert torch.equal(report.loss, loss) and report.actual is None and report.status is Status.OK
    assert report.evaluations == 1


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


def test_groups_stretch_the_directions_before_they_are_measured() -> None:
    model = network()
    first, last = list(model[0].parameters()), list(model[2].parameters())
    leaves, before = first + last, params(model)
    gradient, hessian = derivatives(fit(model), leaves)
    stretch = torch.cat([torch.ones(16, dtype=F64), torch.full((5,), 0.25, dtype=F64)])
    v = drawn(Gaussian(2), leaves) * stretch
    kappa = -torch.linalg.solve(v @ hessian @ v.T, v @ gradient)
    opt = FoMoHKD([{"params": first, "lr": 0.8}, {"params": last}], lr=0.2, k=2)
    opt.step(fit(model))
    assert_close(params(model), before + 0.8 * kappa @ v, 1e-9)


def test_the_predicted_decrease_is_true_for_groups() -> None:
    a, b = leaf(1.0, 2.0), leaf(3.0)
    opt = FoMoHKD([{"params": [a]}, {"params": [b], "lr": 0.1}], lr=0.6, k=2, accept=Acceptance())
    opt.step(lambda: (a - b).square().sum() + a.square().sum() + 3 * b.square().sum())
    assert opt.report.actual is not None
    assert_close(opt.report.predicted, opt.report.actual, 1e-12)


def test_a_group_added_later_moves() -> None:
    a, b = leaf(1.0, 2.0), leaf(3.0)
    opt = Newton([a])
    opt.step(lambda: a.square().sum() + b.square().sum())
    opt.add_param_group({"params": b, "lr": 0.5})
    assert opt.param_groups[1]["step"] == 1 and b.tolist() == [3.0]
    opt.step(lambda: (a - 1).square().sum() + b.square().sum())
    # the whole space is one plane however it is stretched: Newton ends at the minimum
    assert_close(flat([a, b]), torch.tensor([1.0, 1.0, 0.0], dtype=F64))


def test_a_group_with_lr_zero_stays() -> None:
    a, b = leaf(1.0, 2.0), leaf(3.0)
    FoMoH([{"params": [a], "lr": 0.0}, {"params": [b]}]).step(lambda: (a - b).square().sum())
    assert a.tolist() == [1.0, 2.0] and b.tolist() != [3.0]
    opt = FoMoH([a], lr=0.0)
    opt.step(lambda: a.square().sum())
    assert a.tolist() == [1.0, 2.0] and opt.report.status is Status.OK


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


def test_a_function_with_its_batch() -> None:
    one, two = network(), network()
    a, b = FoMoHKD(one.parameters(), k=3), FoMoHKD(two.parameters(), k=3)
    a.step(fit(one))
    b.step(lambda x, y: (two(x) - y).square().mean(), X, Y)
    assert torch.equal(params(one), params(two))


@pytest.mark.parametrize("method", [FGD, FoMoH, FoMoHBP, FoMoHKD, Newton])
def test_micro_batches_are_averaged(method: type[HyperplaneSearch]) -> None:
    whole, split = network(), network()
    a, b = method(whole.parameters(), accept=Acceptance()), method(split.parameters(), accept=Acceptance())
    parts = [lambda i=i: (split(X[i : i + 2]) - Y[i : i + 2]).square().mean() for i in range(0, 8, 2)]
    for _ in range(2):
        assert_close(b.step(parts), a.step(fit(whole)))
    assert_close(params(split), params(whole), 1e-8)
    assert a.report.actual is not None and b.report.actual is not None
    assert_close(b.report.actual, a.report.actual, 1e-8)
    assert b.report.evaluations == 4 * a.report.evaluations


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_chunks_give_the_same_step(chunk_size: int) -> None:
    whole, split = network(), network()
    a, b = FoMoHKD(whole.parameters(), k=5), FoMoHKD(split.parameters(), k=5, chunk_size=chunk_size)
    for _ in range(2):
        a.step(fit(whole))
        b.step(fit(split))
    assert_close(params(split), params(whole), 1e-8)


class Counted:
    """Gaussian directions that note how many rows they are asked for at once."""

    def __init__(self, k: int) -> None:
        self.k, self.most = k, 0

    def count(self, leaves: Sequence[Tensor]) -> int:
        return self.k

    def draw(self, plane: Plane) -> Directions:
        rows, outer = Gaussian(self.k).draw(plane), self

        class Lazy:
            k = outer.k

            def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
                outer.most = max(outer.most, stop - start)
                return rows.rows(position, like, start, stop)

        return Lazy()


def test_directions_are_never_all_there_at_once() -> None:
    model, family = network(), Counted(9)
    HyperplaneSearch(model.parameters(), 1.0, family, ExactHessian(), SaddleFree(), chunk_size=2).step(fit(model))
    assert family.most == 4  # a chunk of pairs touches two blocks of directions


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


def test_acceptance_sees_the_same_dropout_mask() -> None:
    model = noisy()
    before = state(model)
    opt = FoMoH(model.parameters(), lr=0.1, accept=Acceptance(backtracks=5))
    torch.manual_seed(5)
    loss = opt.step(fit(model))
    after = state(model)
    model.load_state_dict(
        {name: after[name] if name in dict(model.named_parameters()) else before[name] for name in after}
    )
    torch.manual_seed(5)
    assert opt.report.actual is not None and opt.report.status is Status.OK
    assert_close(loss - fit(model)().detach(), opt.report.actual)


def test_rejected_trials_leave_no_trace_in_buffers() -> None:
    model = noisy()
    opt = FGD(model.parameters(), lr=1e200, accept=Acceptance())
    opt.step(fit(model))
    assert opt.report.status is Status.REJECTED
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


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


METHODS = {"fgd": FGD, "fomoh": FoMoH, "fomoh-bp": FoMoHBP, "fomoh-kd": FoMoHKD, "newton": Newton}


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
        (lambda x: x.sum(), lambda p: FoMoH(p, solver=AbsoluteCurvature(eps=0.0)), Status.FLAT),
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
        "3 steps in a row did not move the parameters, the last with status NONFINITE; expected fewer, or a larger"
    )
    with pytest.raises(OptimizationStalled, match=message):
        opt.step(bad)
    assert opt.report.status is Status.NONFINITE
    never = FoMoH([x], patience=None)
    for _ in range(20):
        never.step(bad)


def test_acceptance_rejects() -> None:
    x = leaf(1.0)
    opt = HyperplaneSearch([x], 3.0, Coordinate(), ExactHessian(), JitteredInverse(), accept=Acceptance())
    opt.step(lambda: x.square().sum())  # the step ends at -2
    assert x.tolist() == [1.0] and opt.report.status is Status.REJECTED
    assert opt.report.actual is not None
    assert_close(opt.report.actual, torch.tensor(-3.0, dtype=F64))
    assert opt.report.evaluations == 2


def test_acceptance_backtracks() -> None:
    x = leaf(1.0)
    opt = HyperplaneSearch([x], 8.0, Coordinate(), ExactHessian(), JitteredInverse(), accept=Acceptance(backtracks=3))
    opt.step(lambda: x.square().sum())  # -7, -3, -1: as high as 1, which does not rise
    assert opt.report.evaluations == 4 and opt.report.status is Status.OK
    assert_close(x.detach(), torch.tensor([-1.0], dtype=F64))
    assert_close(opt.report.coefficients, torch.tensor([-0.25], dtype=F64))
    x = leaf(1.0)
    strict = Acceptance(backtracks=5, fraction=0.1)
    opt = HyperplaneSearch([x], 8.0, Coordinate(), ExactHessian(), JitteredInverse(), accept=strict)
    opt.step(lambda: x.square().sum())
    assert opt.report.actual is not None
    assert_close(opt.report.predicted, opt.report.actual)


def test_acceptance_gives_up_after_its_backtracks() -> None:
    x = leaf(1.0)
    opt = Newton([x], lr=1e6, accept=Acceptance(backtracks=4))
    opt.step(lambda: x.square().sum())
    assert x.tolist() == [1.0] and opt.report.status is Status.REJECTED and opt.report.evaluations == 6


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


def test_clip_bounds_the_update() -> None:
    model, free = network(), network()
    before = params(model)
    opt = FoMoHKD(model.parameters(), k=3, clip=1e-3, accept=Acceptance(backtracks=0))
    opt.step(fit(model))
    other = FoMoHKD(free.parameters(), k=3)
    other.step(fit(free))
    update, full = params(model) - before, params(free) - before
    assert_close(update.norm(), torch.tensor(1e-3, dtype=F64), 1e-12)
    assert_close(update / update.norm(), full / full.norm(), 1e-9)
    assert opt.report.actual is not None
    torch.testing.assert_close(opt.report.predicted, opt.report.actual, rtol=1e-2, atol=0.0)
    loose = network()
    FoMoHKD(loose.parameters(), k=3, clip=1e6).step(fit(loose))
    assert torch.equal(params(loose), params(free))


def test_weight_decay_is_decoupled() -> None:
    plain, decayed = network(), network()
    before = params(plain)
    FoMoH(plain.parameters(), lr=0.5).step(fit(plain))
    FoMoH(decayed.parameters(), lr=0.5, weight_decay=0.1).step(fit(decayed))
    assert_close(params(decayed), params(plain) - 0.5 * 0.1 * before)


def test_frozen_parameters_stay() -> None:
    model = network()
    leaves = list(model.parameters())
    model[0].requires_grad_(False)
    opt = FoMoHKD(leaves, k=2)
    first, last = flat(leaves[:2]), flat(leaves[2:])
    opt.step(fit(model))
    assert torch.equal(flat(leaves[:2]), first) and not torch.equal(flat(leaves[2:]), last)
    model[0].requires_grad_(True)
    model[2].requires_grad_(False)  # later, the other ones
    first, last = flat(leaves[:2]), flat(leaves[2:])
    opt.step(fit(model))
    assert not torch.equal(flat(leaves[:2]), first) and torch.equal(flat(leaves[2:]), last)


def test_unused_parameters_stay() -> None:
    a, b = leaf(1.0, 2.0), leaf(3.0)
    FoMoHKD([a, b], k=2, weight_decay=0.1).step(lambda: rosenbrock(a))
    assert b.tolist() == [3.0] and a.tolist() != [1.0, 2.0]


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


P = torch.ones(3, dtype=F64, requires_grad=True)
Q = torch.ones(2, dtype=F64, requires_grad=True)


def build(**options: object) -> HyperplaneSearch:
    return HyperplaneSearch([P], 1.0, Gaussian(1), ExactHessian(), JitteredInverse(), **options)


def another_device() -> Tensor:
    return torch.empty(2, dtype=F64, device="meta", requires_grad=True)


CONSTRUCTION: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    ("k-zero", lambda: FoMoHKD([P], k=0), ValueError, "k is 0; expected at least one direction"),
    ("k-negative", lambda: FGD([P], k=-1), ValueError, "k is -1; expected at least one direction"),
    ("k-large", lambda: FoMoHKD([P], k=4), ValueError, "k is 4, but the parameters have 3 entries; expected at most"),
    ("lr-negative", lambda: FoMoH([P], lr=-1.0), ValueError, "lr is -1.0; expected a finite number that is not neg"),
    ("lr-nan", lambda: FoMoH([P], lr=float("nan")), ValueError, "lr is nan; expected a finite number"),
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
    ("accept", lambda: build(accept=True), TypeError, "accept is bool; expected an Acceptance or None"),
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


def backward() -> Tensor:
    loss = P.square().sum()
    loss.backward()
    return loss


CLOSURES: list[tuple[str, tuple, type[Exception], str]] = [
    ("missing", (), TypeError, "step got NoneType; expected a closure that returns the loss, or a list of such"),
    ("tensor", (P,), TypeError, "step got Parameter|step got Tensor; expected a closure"),
    ("no-closures", ([],), ValueError, "step got an empty list of closures; expected at least one"),
    ("list-of", ([lambda: P.sum(), 3],), TypeError, "closure 1 of the list is int; expected a closure"),
    ("list-and-batch", ([lambda: P.sum()], 3), TypeError, "step got a list of closures and a batch; expected closures"),
    ("none", (lambda: None,), TypeError, "the closure returned None; expected the loss as a scalar tensor"),
    ("float", (lambda: 1.5,), TypeError, "the closure returned float 1.5; expected the loss as a scalar tensor"),
    ("item", (lambda: P.sum().item(),), TypeError, "the closure returned float 3.0; expected the loss as a scalar"),
    ("matrix", (lambda: P[None],), ValueError, r"the closure returned a tensor of shape \(1, 3\); expected a scalar"),
    ("integer", (lambda: P.argmax(),), TypeError, "a tensor of dtype torch.int64; expected a floating-point loss"),
    ("unused", (lambda: Q.sum(),), ValueError, "the closure uses none of the parameters; expected a loss that dep"),
    ("backward", (backward,), ValueError, "the closure calls backward, which a step does not use; expected a closure"),
    (
        "backward-with-grad",
        (torch.enable_grad()(backward),),
        ValueError,
        "the closure calls backward, which a step does not use; expected a closure that only returns the loss",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "message"), [r[1:] for r in CLOSURES], ids=[r[0] for r in CLOSURES])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_bad_closures(method: type[HyperplaneSearch], arguments: tuple, error: type[Exception], message: str) -> None:
    opt = method([P])
    before = opt.state_dict()
    with pytest.raises(error, match=message):
        opt.step(*arguments)
    assert P.tolist() == [1.0, 1.0, 1.0] and P.grad is None
    assert opt.state_dict() == before
    with pytest.raises(RuntimeError, match="there is no report before the first step; expected a call of step"):
        _ = opt.report


def test_other_errors_of_the_closure_pass() -> None:
    opt = FoMoH([P])
    with pytest.raises(RuntimeError, match="size"):
        opt.step(lambda: (P + torch.ones(2, dtype=F64)).sum())


def test_bad_groups_change_nothing() -> None:
    opt = Newton([P], max_dim=4)
    rows = [
        ({"params": [Q], "lr": float("nan")}, ValueError, "lr is nan"),
        ({"params": [P]}, ValueError, "parameter 0 is in another group already"),
        ({"params": [another_device()]}, ValueError, "on meta"),
        ({"params": [torch.arange(2)]}, TypeError, "the new group's parameter 0 has dtype torch.int64"),
        ({"params": [Q]}, ValueError, "the parameters have 5 entries"),
        ({"params": {Q}}, TypeError, "ordered collections"),
    ]
    for group, error, message in rows:
        with pytest.raises(error, match=message):
            opt.add_param_group(group)
        assert len(opt.param_groups) == 1
    with pytest.raises(TypeError, match="must be a dict"):
        opt.add_param_group([Q])


def test_nothing_that_can_move() -> None:
    x = torch.ones(2, dtype=F64)
    opt = FoMoH([x])
    with pytest.raises(ValueError, match="no parameter requires grad; expected at least one that can move"):
        opt.step(lambda: x.sum())


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


@pytest.mark.parametrize("make", [FGD, FoMoH, FoMoHBP, lambda p, lr: FoMoHKD(p, lr, k=2, chunk_size=1)])
def test_aux_is_that_of_the_point_before_the_step(make):
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    opt = make([x], 0.1)
    before = x.detach().clone()
    loss = opt.step(lambda: (x.square().sum(), {"x": x, "name": "aux"}), has_aux=True)
    assert float(loss) == 25.0
    assert torch.equal(opt.report.aux["x"], before) and opt.report.aux["name"] == "aux"
    assert not opt.report.aux["x"].requires_grad and not torch.equal(x.detach(), before)


def test_aux_of_several_closures_is_a_list():
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    opt = FoMoH([x], 0.1)
    opt.step([lambda: (x.square().sum(), 1), lambda: (x.sum(), 2)], has_aux=True)
    assert opt.report.aux == [1, 2]
    opt.step(lambda: x.square().sum())
    assert opt.report.aux is None


def test_a_closure_without_aux_is_refused():
    x = torch.tensor([3.0], requires_grad=True)
    with pytest.raises(TypeError, match=r"the closure returned Tensor; expected a pair \(loss, aux\) with has_aux"):
        FoMoH([x]).step(lambda: x.square().sum(), has_aux=True)
