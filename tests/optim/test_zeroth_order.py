"""MeZO and FZOO against their formulas, in float64, and the manners of an optimizer."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jetplane as jp
from cases import F64, assert_close
from jetplane.directions import Family, Gaussian, Rademacher
from jetplane.optim import FZOO, MeZO, ZerothOrder
from jetplane.solvers import Status
from stepping import derivatives, drawn, fit, network, params

METHODS: dict[str, Callable[..., ZerothOrder]] = {"mezo": MeZO, "fzoo": FZOO}


def loss_at(model: nn.Module, point: Tensor) -> Tensor:
    before = params(model)
    torch.nn.utils.vector_to_parameters(point, model.parameters())
    with torch.no_grad():
        loss = fit(model)()
    torch.nn.utils.vector_to_parameters(before, model.parameters())
    return loss


def expected(name: str, model: nn.Module, lr: float, k: int, eps: float, rows: Tensor) -> Tensor:
    """The papers' update, direction by direction, from losses at points that are written out."""
    theta = params(model)
    if name == "mezo":
        total = torch.zeros_like(theta)
        for z in rows:
            plus, minus = loss_at(model, theta + eps * z), loss_at(model, theta - eps * z)
            total += (plus - minus) / (2 * eps) * z
        return theta - lr * total / k
    here = loss_at(model, theta)
    losses = [loss_at(model, theta + eps * u) for u in rows]
    mean = sum(losses) / k
    deviation = (sum((loss - mean) ** 2 for loss in losses) / (k - 1)) ** 0.5
    gradient = sum((loss - here) * u for loss, u in zip(losses, rows, strict=True)) / (eps * k)
    return theta - lr * gradient / deviation


@pytest.mark.parametrize(("name", "k"), [("mezo", 1), ("mezo", 3), ("fzoo", 2), ("fzoo", 8)])
def test_the_step_is_the_papers_formula(name: str, k: int) -> None:
    model = network()
    family: Family = (Gaussian if name == "mezo" else Rademacher)(k)
    opt = METHODS[name](model.parameters(), lr=0.01, k=k, eps=1e-3, seed=4)
    evaluations = 0

    def closure() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        return fit(model)()

    with jp.forward_only():
        for step in range(3):
            rows = drawn(family, list(model.parameters()), seed=4, step=step)
            wanted = expected(name, model, 0.01, k, 1e-3, rows)
            before = loss_at(model, params(model))
            loss = opt.step(closure)
            # losses of about 1 with 16 digits, by differences of about 1e-3
            torch.testing.assert_close(params(model), wanted, rtol=0, atol=1e-12)
            torch.testing.assert_close(loss, before, rtol=0, atol=0.0 if name == "fzoo" and not step else 1e-4)
            assert opt.report.evaluations == (2 * k if name == "mezo" else k + 1)
    assert evaluations == 3 * opt.report.evaluations and opt.report.status is Status.OK


def test_slopes_are_those_of_forward_mode_but_for_the_length_of_the_difference() -> None:
    """From both sides the error is of the second order, from one side of the first."""
    for name, order in (("mezo", 2), ("fzoo", 1)):
        errors = []
        for eps in (1e-2, 1e-3):
            model = network()
            opt = METHODS[name](model.parameters(), lr=0.0, k=4, eps=eps)
            leaves = list(model.parameters())
            gradient, _ = derivatives(fit(model), leaves)
            exact = drawn(opt.directions, leaves) @ gradient
            opt.step(fit(model))
            errors.append(float((opt.report.slope - exact).abs().max()))
        assert 0.5 < errors[0] / errors[1] / 10**order < 2


@pytest.mark.parametrize("name", METHODS)
def test_a_rate_and_a_decay_of_each_group(name: str) -> None:
    one, other = network(), network()
    groups = [{"params": one[0].parameters(), "weight_decay": 0.5}, {"params": one[2].parameters(), "lr": 0.0}]
    opt, plain = METHODS[name](groups, lr=0.01), METHODS[name](other.parameters(), lr=0.01)
    before = [p.detach().clone() for p in one.parameters()]
    opt.step(fit(one))
    plain.step(fit(other))
    for start, p, q in zip(before[:2], one[0].parameters(), other[0].parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach() - 0.01 * 0.5 * start, rtol=0, atol=1e-12)
    for start, p in zip(before[2:], one[2].parameters(), strict=True):
        torch.testing.assert_close(p.detach(), start, rtol=0, atol=1e-15)  # moved there and back


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.inference_mode])
def test_every_evaluation_sees_the_same_dropout_and_buffers_change_once(name: str, around: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 1)).to(F64)
    x = torch.randn(16, 6, dtype=F64)
    opt = METHODS[name](model.parameters(), lr=0.0, eps=1e-5)
    with around():
        opt.step(lambda: model(x).square().mean())
    assert int(model[1].num_batches_tracked) == 1
    torch.testing.assert_close(model[1].running_mean, 0.1 * model[0](x).detach().mean(0), rtol=0, atol=1e-4)
    # other masks would differ by about 1, over eps
    assert float(opt.report.slope.abs().max()) < 30


@pytest.mark.parametrize("name", METHODS)
def test_parts_of_a_batch_and_what_comes_with_the_loss(name: str) -> None:
    found = []
    for parts in (1, 2):
        model = network()
        x, y = torch.randn(8, 3, dtype=F64, generator=torch.Generator().manual_seed(1)), torch.ones(8, 1, dtype=F64)
        opt = METHODS[name](model.parameters(), lr=0.01)

        def closure(x: Tensor, y: Tensor, model: nn.Module = model) -> tuple[Tensor, int]:
            return F.mse_loss(model(x), y), len(x)

        if parts == 1:
            opt.step(closure, x, y, has_aux=True)
        else:
            opt.step(
                [lambda a=a, b=b: closure(a, b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)], has_aux=True
            )
        assert opt.report.aux == (8 if parts == 1 else [4, 4])
        found.append(params(model))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_a_copy_and_a_state_go_on_as_the_original_does(name: str) -> None:
    model = network()
    opt = METHODS[name](model.parameters(), lr=0.01, seed=3)
    for _ in range(2):
        opt.step(fit(model))
    twins = [copy.deepcopy((model, opt)), pickle.loads(pickle.dumps((model, opt)))]
    rest = copy.deepcopy(model)
    third = METHODS[name](rest.parameters(), lr=1.0)
    third.load_state_dict(copy.deepcopy(opt.state_dict()))
    reports = opt.steps(lambda number: fit(model)(), torch.arange(2))
    assert len(reports) == 2 and reports.loss.shape == (2,)
    for other, twin in [*twins, (rest, third)]:
        for _ in range(2):
            twin.step(fit(other))
        assert torch.equal(params(other), params(model))


@pytest.mark.parametrize("name", METHODS)
def test_a_step_that_cannot_be_taken_moves_nothing_but_by_rounding(name: str) -> None:
    model = network()
    before = params(model)
    opt = METHODS[name](model.parameters(), lr=1.0)
    opt.step(lambda: fit(model)() * torch.nan)
    assert opt.report.status is Status.NONFINITE
    opt.step(lambda: torch.zeros((), dtype=F64))
    assert opt.report.status is Status.FLAT

    def fails() -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opt.step(fails)
    assert_close(params(model), before, 1e-14)
    assert opt.param_groups[0]["step"] == 2


@pytest.mark.parametrize("name", ["mezo", pytest.param("fzoo", marks=pytest.mark.slow)])
def test_it_trains(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    x = torch.randn(64, 4)
    y = x[:, :3].argmax(1)
    opt = METHODS[name](model.parameters(), lr={"mezo": 0.05, "fzoo": 3e-5}[name])
    losses = [float(opt.step(lambda: F.cross_entropy(model(x), y, reduction="none"))) for _ in range(300)]
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda p: MeZO(p, eps=0.0), ValueError, "eps is 0.0; expected a finite positive number, the length of a"),
        (lambda p: FZOO(p, eps="small"), TypeError, "eps is 'small'; expected a number, or a tensor of one element."),
        (
            lambda p: FZOO(p, k=1),
            ValueError,
            "k is 1; expected at least two directions, whose losses have a deviation.",
        ),
        (lambda p: MeZO(p, k=0), ValueError, "k is 0; expected at least one direction."),
        (lambda p: MeZO(p, lr=-1.0), ValueError, "lr is -1.0; expected a finite number that is not negative."),
        (lambda p: MeZO(p, seed=-1), ValueError, "seed is -1; expected a whole number from 0"),
        (
            lambda p: FZOO([*p, p[0]]),
            ValueError,
            "parameter 4 is in the parameter list already; expected each parameter",
        ),
        (
            lambda p: MeZO([*p, torch.zeros(2, dtype=torch.complex64, requires_grad=True)]),
            TypeError,
            "the new group's parameter 4 has dtype torch.complex64; expected real numbers here, of which the program",
        ),
        (lambda p: MeZO(p).report, RuntimeError, "there is no report before the first step; expected a call of step."),
        (lambda p: MeZO(p).step(), TypeError, "step got NoneType; expected a closure that returns the loss"),
    ],
)
def test_bad_arguments(make: Callable[[list[Tensor]], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match="^" + re.escape(message)):
        make(list(network().parameters()))
