"""Adam's scales along the axes in which a weight's gradient is not correlated."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetplane.optim import HorizonAdam, eigenbasis

F64 = torch.float64
ONE, YES = torch.ones((), dtype=F64), torch.tensor(True)


def seen(*shape: int, times: int = 3) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The state of a weight after some gradients, and these."""
    state = {"exp_avg": torch.zeros(shape, dtype=F64), **eigenbasis.fresh(torch.zeros(shape, dtype=F64))}
    grads = [torch.randn(shape, dtype=F64) for _ in range(times)]
    for count, grad in enumerate(grads, 1):
        eigenbasis.see(state, grad, ONE / count, YES)
    eigenbasis.refresh(state)
    return state, grads


@pytest.mark.parametrize("shape", [(6, 4), (5, 2, 3, 3)])
def test_along_the_axes_the_entries_are_not_correlated(shape: tuple[int, ...]) -> None:
    state, grads = seen(*shape)
    turned = torch.cat([eigenbasis.away(state, grad).flatten(1) for grad in grads])
    products = turned.T @ turned
    torch.testing.assert_close(products, products.diag().diag(), rtol=0, atol=1e-10)
    torch.testing.assert_close(eigenbasis.back(state, eigenbasis.away(state, grads[0])), grads[0])
    assert eigenbasis.away(state, grads[0]).shape == shape


def test_the_mean_is_turned_to_new_axes() -> None:
    state, grads = seen(6, 4)
    state["exp_avg"].copy_(eigenbasis.away(state, grads[0]))
    before = state["basis"].clone()
    eigenbasis.see(state, torch.randn(6, 4, dtype=F64), ONE / 2, YES)
    eigenbasis.refresh(state)
    assert float((state["basis"] - before).abs().max()) > 0.1
    torch.testing.assert_close(eigenbasis.back(state, state["exp_avg"]), grads[0])


@pytest.mark.parametrize(
    "leaf",
    [*(torch.zeros(shape) for shape in [(5,), (5, 1), (5, 0), (2, 1025)]), torch.zeros(3, 3, dtype=torch.bfloat16)],
    ids=["a vector", "one input", "none", "many inputs", "half precision"],
)
def test_other_parameters_keep_their_own_axes(leaf: Tensor) -> None:
    state = eigenbasis.fresh(leaf)
    eigenbasis.see(state, leaf, ONE, YES)
    eigenbasis.refresh(state)
    assert state == {} and eigenbasis.away(state, leaf) is leaf and eigenbasis.back(state, leaf) is leaf


@pytest.mark.parametrize("grad, taken", [(torch.ones(4, 3), False), (torch.full((4, 3), 1e30), True)])
def test_what_is_not_taken_or_too_large_to_square_is_not_seen(grad: Tensor, taken: bool) -> None:
    state = eigenbasis.fresh(torch.zeros(4, 3))
    eigenbasis.see(state, torch.randn(4, 3), ONE, YES)
    before = state["moment"].clone()
    eigenbasis.see(state, grad, ONE, torch.tensor(taken))
    assert torch.equal(state["moment"], before)


def regression(turn: Tensor, **options: Any) -> Tensor:
    """The losses of a linear layer whose inputs are turned."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, dtype=F64, generator=generator) * torch.tensor([3.0, 1.0, 0.2], dtype=F64)
    y = torch.randn(64, 6, dtype=F64, generator=generator) + x @ torch.randn(3, 6, dtype=F64, generator=generator)
    weight = torch.zeros(6, 3, dtype=F64, requires_grad=True)
    opt = HorizonAdam([weight], samples=1, **options)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(F.linear(x, weight), y, reduction="none").sum(1)

    return torch.stack([opt.step(loss_fn, x @ turn, y) for _ in range(40)])


def test_the_path_does_not_depend_on_the_axes_of_the_inputs() -> None:
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=F64, generator=torch.Generator().manual_seed(1)))[0]
    plain, turned = (regression(one) for one in (torch.eye(3, dtype=F64), turn))
    torch.testing.assert_close(plain, turned, rtol=1e-6, atol=0)
    apart = [regression(one, rotate=False) for one in (torch.eye(3, dtype=F64), turn)]
    assert float((apart[0] - apart[1]).abs().max()) > 1e-3


def trained(rotate: bool) -> tuple[nn.Module, HorizonAdam]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    opt = HorizonAdam(model.parameters(), rotate=rotate)
    x, y = torch.randn(32, 4), torch.arange(32) % 3
    for _ in range(6):
        opt.step(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x, y)
    return model, opt


@pytest.mark.parametrize("rotate, has", [(True, "no axes"), (False, "axes")])
def test_a_state_of_other_axes_is_refused_and_nothing_lost(rotate: bool, has: str) -> None:
    (_, opt), (_, other) = trained(rotate), trained(not rotate)
    before = copy.deepcopy(opt.state_dict())
    message = (
        f"the state has {has} for parameter 0 of shape (8, 4); expected one that HorizonAdam.state_dict gave, with "
        f"rotate={rotate}."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        opt.load_state_dict(other.state_dict())
    torch.testing.assert_close(opt.state_dict(), before)


def test_the_axes_are_found_at_the_first_step_and_when_they_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    original = eigenbasis.refresh
    monkeypatch.setattr(eigenbasis, "refresh", lambda state: (found.append(opt.calls), original(state)))
    weight = torch.zeros(6, 3, dtype=F64, requires_grad=True)
    opt = HorizonAdam([weight], samples=1, every=2)
    x, y = torch.randn(8, 3, dtype=F64), torch.randn(8, 6, dtype=F64)
    for _ in range(22):
        opt.step(lambda x, y: F.mse_loss(F.linear(x, weight), y, reduction="none").sum(1), x, y)
    assert found == [0, 2, 4, 6, 8, 10, 12, 14, 16, 20]


def failing(times: int, kind: str) -> Any:
    """torch.linalg.eigh, that fails the first times it is called."""
    eigh, calls = torch.linalg.eigh, iter(range(times))

    def found(matrix: Tensor) -> Any:
        if next(calls, None) is None:
            return eigh(matrix)
        if kind == "raises":
            raise torch.linalg.LinAlgError("it failed to converge.")
        values, vectors = eigh(matrix)
        return values, vectors * torch.nan

    return found


@pytest.mark.parametrize("kind", ["raises", "NaN"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_decomposition_that_fails_leaves_good_axes(
    times: int, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leaf = torch.zeros(6, 4)
    state = {"exp_avg": torch.randn(6, 4), **eigenbasis.fresh(leaf)}
    eigenbasis.see(state, torch.randn(6, 4), ONE, YES)
    mean = state["exp_avg"].clone()
    monkeypatch.setattr(torch.linalg, "eigh", failing(times, kind))
    eigenbasis.refresh(state)
    torch.testing.assert_close(state["basis"].T @ state["basis"], torch.eye(4))
    torch.testing.assert_close(eigenbasis.back(state, state["exp_avg"]), mean)
    assert torch.equal(state["basis"], torch.eye(4)) == (times == 2)
    assert ("4 inputs could not be found anew" in caplog.text) == (times == 2)
