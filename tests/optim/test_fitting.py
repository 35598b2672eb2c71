"""A budget of bytes for the passes of a step: the same numbers, and only the first step pays for measuring."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases import F64
from jetplane.ad.run import budget
from jetplane.ad.run.budget import Trace
from jetplane.directions import Gaussian
from jetplane.optim import FGD, Acceptance, FoMoH, FoMoHBP, FoMoHKD, GaussNewtonSearch, HyperplaneSearch
from jetplane.optim.fitting import shapes

X, Y = torch.sin(torch.arange(64 * 6, dtype=F64) ** 2).reshape(64, 6), torch.arange(64) % 3


def network(**options: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        dropout = nn.Dropout(options.get("dropout", 0.0))
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), dropout, nn.Linear(8, 3)).double()


def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: F.cross_entropy(model(x), y)


def state(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().double().flatten() for one in model.state_dict().values()])


def needed(step: Callable[[], Any]) -> int:
    with Trace.of([]) as trace:
        step()
    return int(trace.peak())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The sizes that were found by measuring."""
    found: list[int | None] = []
    original = budget.fit

    def fit(*args: Any) -> int | None:
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr("jetplane.optim.closures.fit", fit)
    return found


METHODS: dict[str, Callable[..., HyperplaneSearch]] = {
    "FGD": partial(FGD, lr=0.01, k=6),
    "FoMoH": FoMoH,
    "FoMoH-BP": FoMoHBP,
    "FoMoH-6D": partial(FoMoHKD, lr=0.1, k=6),
    "Gauss-Newton": partial(FoMoHKD, lr=0.1, k=6, curvature="ggn"),
    "Fisher": partial(GaussNewtonSearch, k=6),
    "several planes": partial(FoMoHKD, lr=0.1, k=4, samples=2),
    "accepted": partial(FoMoHKD, lr=0.1, k=4, accept=Acceptance(backtracks=2)),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_steps_are_those_without_a_budget(name: str, measured: list[int | None]) -> None:
    make = METHODS[name]
    plain, tight = network(dropout=0.3), network(dropout=0.3)
    chunks = copy.deepcopy(plain)
    least = needed(partial(make(chunks.parameters(), chunk_size=1, patience=None).step, loss_of(chunks), X, Y))
    one, other = make(plain.parameters(), patience=None), make(tight.parameters(), patience=None, memory=2 * least)
    for seed in range(3):
        torch.manual_seed(seed)
        expected = one.step(loss_of(plain), X, Y)
        left = torch.get_rng_state()
        torch.manual_seed(seed)
        torch.testing.assert_close(other.step(loss_of(tight), X, Y), expected, rtol=1e-9, atol=1e-12)
        assert torch.equal(torch.get_rng_state(), left)
    torch.testing.assert_close(state(tight), state(plain), rtol=1e-7, atol=1e-10)
    assert len(measured) == 1  # later steps use what the first one found


def test_the_budget_is_kept_by_every_step(measured: list[int | None]) -> None:
    model = network()

    def make(**options: Any) -> FoMoHKD:
        return FoMoHKD(model.parameters(), lr=0.0, k=10, **options)

    whole = needed(partial(make().step, loss_of(model), X, Y))
    least = needed(partial(make(chunk_size=1).step, loss_of(model), X, Y))
    for share in (0.1, 0.3, 0.6, 1.5):
        limit = int(1.3 * least + share * whole)
        opt = make(memory=limit)
        for _ in range(2):
            assert needed(partial(opt.step, loss_of(model), X, Y)) <= limit
    assert (
        len(set(measured)) > 1 and measured[-1] is None
    )  # all at once where there is room, and not where there is none
    assert len(measured) == 4


def test_only_what_looks_different_is_measured_again(measured: list[int | None]) -> None:
    model = network()
    opt = FoMoHKD(model.parameters(), lr=0.0, k=3, memory="1GiB")
    for rows in (64, 32, 64, 32):
        opt.step(loss_of(model), X[:rows], Y[:rows])
    assert len(measured) == 2
    opt.step([lambda: loss_of(model)(X, Y)] * 2)
    assert len(measured) == 3
    with torch.autocast("cpu", torch.bfloat16):
        opt.step(loss_of(model), X, Y)
    assert len(measured) == 4
    model, opt = copy.deepcopy((model, opt))
    assert opt.memory == "1GiB"
    opt.step(loss_of(model), X, Y)
    assert len(measured) == 4  # a copy knows what was found


def test_the_least_recent_sizes_are_forgotten(measured: list[int | None]) -> None:
    x = torch.ones(2, dtype=F64, requires_grad=True)
    opt = FoMoH([x], lr=0.0, memory="1MiB")
    for rows in [*range(1, 67), 1, 66]:
        opt.step(lambda batch: (x.sum() * batch).sum(), torch.ones(rows, dtype=F64))
    assert len(measured) == 67


def test_the_first_step_says_what_one_direction_needs() -> None:
    model = network()
    opt = FoMoHKD(model.parameters(), k=3, memory=100)
    before = state(model)
    with pytest.raises(ValueError, match=r"memory is 100 B \(100 bytes\), but one direction at a time needs"):
        opt.step(loss_of(model), X, Y)
    assert torch.equal(state(model), before)


def test_measuring_keeps_the_grad_and_refuses_backward() -> None:
    x = torch.ones(2, dtype=F64, requires_grad=True)
    x.grad = torch.full((2,), 7.0, dtype=F64)
    opt = FoMoH([x], memory="1MiB")
    opt.step(lambda: x.square().sum())
    assert x.grad is not None and x.grad.tolist() == [7.0, 7.0]

    def trains() -> Tensor:
        with torch.enable_grad():
            loss = x.square().sum()
            loss.backward()
        return loss

    with pytest.raises(ValueError, match="the closure calls backward, which a step does not use"):
        FoMoH([x], memory="1MiB").step(trains)


def test_shapes_of_what_a_closure_holds() -> None:
    def default(x: Tensor = X, *, y: Tensor = Y) -> Tensor:
        return x.sum() + y.sum()

    class Holder:
        def method(self, x: Tensor = X) -> Tensor:
            return x

    def unset() -> Tensor:
        return later

    if False:
        later = X
    x, y = ((64, 6), F64), ((64,), torch.int64)
    assert shapes([default]) == (x, y, None)
    assert shapes([Holder().method]) == (x, None)
    assert shapes([partial(torch.sum, {"a": [X, Y]}, dim=0)]) == (x, y, None)
    assert shapes([lambda: X.sum() + Y.sum(), lambda: Y]) == (x, y, None, y, None)
    assert shapes([unset]) == (None,)


def test_a_budget_and_another_word_on_chunks_are_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="chunk_size is 2 and memory is '4GiB'; expected one of them"):
        FoMoHKD([x], k=2, chunk_size=2, memory="4GiB")
    with pytest.raises(ValueError, match="memory is '4GB', which may need several passes; expected None with compile"):
        FoMoHKD([x], k=2, memory="4GB", compile=True)
    with pytest.raises(ValueError, match="memory is 'much'; expected a positive number of bytes, or a text such as"):
        HyperplaneSearch([x], 1.0, Gaussian(1), "exact", FoMoH([x]).solver, memory="much")
