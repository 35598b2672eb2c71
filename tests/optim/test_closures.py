"""What a step calls: a closure, a function with its batch, several closures, auxiliary values."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from cases import F64, assert_close
from jetplane.directions import Gaussian
from jetplane.optim import FGD, Acceptance, FoMoH, FoMoHBP, FoMoHKD, HyperplaneSearch, Newton
from jetplane.solvers import LevenbergMarquardt, SaddleFree, Solver, Status
from stepping import METHODS, P, Q, X, Y, backward, fit, leaf, network, params


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


CLOSURES: list[tuple[str, tuple, type[Exception], str]] = [
    ("missing", (), TypeError, "step got NoneType; expected a closure that returns the loss, or a list of closures"),
    ("tensor", (P,), TypeError, "step got Parameter|step got Tensor; expected a closure"),
    ("no-closures", ([],), ValueError, "step got an empty list of closures; expected at least one"),
    ("list-of", ([lambda: P.sum(), 3],), TypeError, "closure 1 of the list is int; expected a closure"),
    ("list-and-batch", ([lambda: P.sum()], 3), TypeError, "step got a list of closures and a batch; expected closures"),
    ("none", (lambda: None,), TypeError, "the closure returned None; expected the loss as a scalar tensor"),
    ("float", (lambda: 1.5,), TypeError, "the closure returned float 1.5; expected the loss as a scalar tensor"),
    ("item", (lambda: P.sum().item(),), TypeError, "the closure returned float 3.0; expected the loss as a scalar"),
    ("pair", (lambda: (P, P),), TypeError, r"returned tuple \(a pair of a result and aux needs has_aux=True\); expec"),
    ("dict", (lambda: {"loss": P},), TypeError, "the closure returned dict; expected the loss as a scalar tensor"),
    ("empty", (lambda: P[:0],), ValueError, r"the closure returned no loss, \(0,\); expected at least one sample in a"),
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


# -- one loss for each sample -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("method", [FoMoH, FoMoHBP, FoMoHKD, Newton, FGD])
@pytest.mark.filterwarnings("ignore:.*cannot be compiled and is run as it is")  # which then says why
@pytest.mark.usefixtures("traced")
def test_losses_of_samples_are_refused_where_nothing_uses_them(method: Any, compile: bool) -> None:
    p = leaf(1.0, 2.0, 3.0)
    message = (
        "the closure returned a tensor of shape (3,), and this curvature and solver have no use for the losses of "
        "single samples; expected a scalar, as their mean() is, or a part that has: GaussNewton(), EmpiricalFisher() "
        "or LevenbergMarquardt()."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        method([p], compile=compile).step(lambda: p * 2)
    assert p.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("curvature", "solver"),
    [("exact", LevenbergMarquardt()), ("none", LevenbergMarquardt()), ("ggn", SaddleFree()), ("fisher", SaddleFree())],
    ids=str,
)
def test_losses_of_samples_are_taken_where_a_part_uses_them(curvature: str, solver: Solver) -> None:
    p = leaf(1.0, 2.0, 3.0)
    opt = HyperplaneSearch([p], 1.0, Gaussian(2), curvature, solver)
    loss = opt.step(lambda: F.mse_loss(p, torch.zeros_like(p), reduction="none"))
    assert_close(loss, torch.tensor(14 / 3, dtype=F64))
    assert opt.report.status is Status.OK
