"""Adam's scales along the axes in which a weight's gradient is not correlated."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetplane.optim import HorizonAdam
from jetplane.optim.horizon import eigenbasis

F64 = torch.float64
ONE, YES = torch.ones((), dtype=F64), torch.tensor(True)


def fresh(mean: Tensor) -> dict[str, Tensor]:
    return {"exp_avg": mean, "exp_avg_sq": torch.zeros_like(mean), **eigenbasis.fresh(mean)}


def seen(*shape: int, times: int = 3, turns: int = 1) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The state of a weight after some gradients, and these."""
    state = fresh(torch.zeros(shape, dtype=F64))
    grads = [torch.randn(shape, dtype=F64) for _ in range(times)]
    for count, grad in enumerate(grads, 1):
        eigenbasis.see([state], [grad], ONE / count, YES)
    for _ in range(turns):
        eigenbasis.refresh([state])
    return state, grads


@pytest.mark.parametrize("shape", [(6, 4), (5, 2, 3, 3)])
def test_along_the_axes_the_entries_are_not_correlated(shape: tuple[int, ...]) -> None:
    state, grads = seen(*shape, turns=3000)  # eigenvalues may be close
    turned = torch.cat([eigenbasis.away(state, grad).flatten(1) for grad in grads])
    products = turned.T @ turned
    torch.testing.assert_close(products, products.diag().diag(), rtol=0, atol=1e-10)
    torch.testing.assert_close(eigenbasis.back(state, eigenbasis.away(state, grads[0])), grads[0])
    assert eigenbasis.away(state, grads[0]).shape == shape


def test_the_mean_is_turned_to_new_axes() -> None:
    state, grads = seen(6, 4)
    state["exp_avg"].copy_(eigenbasis.away(state, grads[0]))
    before = state["basis"].clone()
    eigenbasis.see([state], [torch.randn(6, 4, dtype=F64)], ONE / 2, YES)
    eigenbasis.refresh([state])
    assert float((state["basis"] - before).abs().max()) > 0.1
    torch.testing.assert_close(eigenbasis.back(state, state["exp_avg"]), grads[0])


@pytest.mark.parametrize(
    "leaf",
    [*(torch.zeros(shape) for shape in [(5,), (5, 1), (5, 0), (2, 1025)]), torch.zeros(3, 3, dtype=torch.bfloat16)],
    ids=["a vector", "one input", "none", "many inputs", "half precision"],
)
def test_other_parameters_keep_their_own_axes(leaf: Tensor) -> None:
    state = eigenbasis.fresh(leaf)
    eigenbasis.see([state], [leaf], ONE, YES)
    eigenbasis.refresh([state])
    assert state == {} and eigenbasis.away(state, leaf) is leaf and eigenbasis.back(state, leaf) is leaf


@pytest.mark.parametrize("grad, taken", [(torch.ones(4, 3), False), (torch.full((4, 3), 1e30), True)])
def test_what_is_not_taken_or_too_large_to_square_is_not_seen(grad: Tensor, taken: bool) -> None:
    state = eigenbasis.fresh(torch.zeros(4, 3))
    eigenbasis.see([state], [torch.randn(4, 3)], ONE, YES)
    before = state["moment"].clone()
    eigenbasis.see([state], [grad], ONE, torch.tensor(taken))
    assert torch.equal(state["moment"], before)


def turned(turn: Tensor, **options: Any) -> Tensor:
    """The losses of a linear layer whose inputs, and whose axes at the start, are turned."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, dtype=F64, generator=generator) * torch.tensor([3.0, 1.0, 0.2], dtype=F64)
    y = torch.randn(64, 6, dtype=F64, generator=generator) + x @ torch.randn(3, 6, dtype=F64, generator=generator)
    weight = torch.zeros(6, 3, dtype=F64, requires_grad=True)
    opt = HorizonAdam([weight], samples=1, **options)
    if "basis" in opt.state[weight]:
        opt.state[weight]["basis"].copy_(turn.T)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(F.linear(x, weight), y, reduction="none").sum(1)

    return torch.stack([opt.step(loss_fn, x @ turn, y) for _ in range(40)])


def test_the_path_depends_on_the_axes_of_the_inputs_by_the_start_alone() -> None:
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=F64, generator=torch.Generator().manual_seed(1)))[0]
    plain, other = (turned(one) for one in (torch.eye(3, dtype=F64), turn))
    torch.testing.assert_close(plain, other, rtol=1e-9, atol=0)
    apart = [turned(one, rotate=False) for one in (torch.eye(3, dtype=F64), turn)]
    assert float((apart[0] - apart[1]).abs().max()) > 1e-3


def rank_deficient() -> tuple[nn.Module, Tensor]:
    """Fewer outputs than inputs, which lie in a space of three dimensions."""
    model = nn.Sequential(nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3))
    return model, torch.randn(32, 3, dtype=F64) @ torch.randn(3, 12, dtype=F64)


def full() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)), torch.randn(32, 8, dtype=F64)


def normed(norm: Callable[[int], nn.Module], norms: int) -> tuple[nn.Module, Tensor]:
    layers, width = list[nn.Module](), 8
    for _ in range(norms):
        layers, width = [*layers, nn.Linear(width, 12), norm(12), nn.ReLU()], 12
    return nn.Sequential(*layers, nn.Linear(12, 3)), torch.randn(32, 8, dtype=F64)


def images(norm: Callable[[], nn.Module], norms: int) -> tuple[nn.Module, Tensor]:
    layers, width = list[nn.Module](), 2
    for _ in range(norms):
        layers, width = [*layers, nn.Conv2d(width, 6, 3, padding=1), norm(), nn.ReLU()], 6
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96, 3)), torch.randn(32, 2, 4, 4, dtype=F64)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 6, 8) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def encoder(layers: int, first: bool) -> tuple[nn.Module, Tensor]:
    inputs, positions = nn.Linear(5, 8), Positions()
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=first)
    body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(inputs, positions, body, Mean(), nn.Linear(8, 3)), torch.randn(32, 6, 5, dtype=F64)


NORMS = {
    "batch": lambda: nn.BatchNorm2d(6),
    "instance": lambda: nn.GroupNorm(6, 6),
    "group": lambda: nn.GroupNorm(2, 6),
}
DEEP = {
    **{f"{norms} batch norms": partial(normed, nn.BatchNorm1d, norms) for norms in (1, 2, 4)},
    **{f"{norms} layer norms": partial(normed, nn.LayerNorm, norms) for norms in (1, 2, 4)},
    **{f"{norms} {name} norms of images": partial(images, norm, norms) for norms in (1, 2, 4) for name, norm in
       NORMS.items()},
    **{f"{layers} encoder layers, norms {'first' if first else 'last'}": partial(encoder, layers, first)
       for layers in (1, 2) for first in (False, True)},
}  # fmt: skip


@pytest.mark.parametrize(
    "make, seed",
    [
        *(pytest.param(make, 0, id=make.__name__) for make in (rank_deficient, full)),
        pytest.param(DEEP["2 batch norms"], 0, id="2 batch norms"),
        *(
            pytest.param(make, seed, id=f"{name}, {seed}", marks=pytest.mark.slow)
            for name, make in DEEP.items()
            for seed in (1, 2, 3)
        ),
    ],
)
def test_a_start_that_differs_in_one_rounding_stays_near(
    make: Callable[[], tuple[nn.Module, Tensor]], seed: int
) -> None:
    ends = []
    for ulps in (0, 1):
        torch.manual_seed(seed)
        model, x = make()
        first = model.double()[0].weight.detach().view(-1)
        if ulps:
            first[3] = torch.nextafter(first[3], torch.tensor(torch.inf, dtype=F64))
        opt, y = HorizonAdam(model.parameters(), samples=2), torch.arange(32) % 3
        for _ in range(100):
            opt.step(lambda x, y, model=model: F.cross_entropy(model(x), y, reduction="none"), x, y)
        ends.append([param.detach().clone() for param in model.parameters()])
    assert 0 < max(float((one - other).abs().max()) for one, other in zip(*ends, strict=True)) < 1e-9


def by_reflections(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The axes after one refresh by QRs: torch's, and mpmath's with 60 digits."""
    moment, basis = state["moment"], state["basis"]
    order = ((moment @ basis) * basis).sum(0).argsort(descending=True, stable=True)
    weights, plain = moment / moment.trace() + 1e-3 * torch.eye(len(moment), dtype=F64), basis[:, order]
    exact = mpmath.matrix(plain.tolist())
    with mpmath.workdps(60):
        for _ in range(2):
            plain, upper = torch.linalg.qr(weights @ plain)
            plain = plain * upper.diagonal().sign()
            exact, above = mpmath.qr(mpmath.matrix(weights.tolist()) * exact)
            exact = exact * mpmath.diag([mpmath.sign(above[n, n]) for n in range(above.rows)])
        return plain, torch.tensor([[float(one) for one in row] for row in exact.tolist()], dtype=F64)


@pytest.mark.parametrize("alike", [0.0, 0.99, 1 - 1e-12], ids=["apart", "alike", "the same"])
def test_the_axes_are_those_of_a_qr_by_reflections(alike: float) -> None:
    states = [fresh(torch.zeros(6, 9, dtype=F64)) for _ in range(2)]
    for turn in range(4):
        for number, state in enumerate(states):
            grad = torch.randn(6, 9, dtype=F64) * (1 - alike) + alike * torch.randn(6, 1, dtype=F64)
            eigenbasis.see([state], [grad * 10 ** (10.0 * number - 5)], ONE / (turn + 1), YES)
        wanted = [by_reflections(state) for state in states]
        eigenbasis.refresh(states)
        for state, (plain, exact) in zip(states, wanted, strict=True):
            off, torchs = float((state["basis"] - exact).abs().max()), float((plain - exact).abs().max())
            assert off < max(10 * torchs, 1e-13) and off < 1e-9
            torch.testing.assert_close(state["basis"].T @ state["basis"], torch.eye(9, dtype=F64), rtol=0, atol=1e-14)


def test_axes_that_cannot_be_found_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eigenbasis, "_SHIFT", 0.0)  # what else keeps a product of rank one from a Cholesky factor
    lost, found = fresh(torch.zeros(1, 3, dtype=F64)), fresh(torch.zeros(4, 3, dtype=F64))
    eigenbasis.see([lost], [torch.ones(1, 3, dtype=F64)], ONE, YES)
    eigenbasis.see([found], [torch.randn(4, 3, dtype=F64)], ONE, YES)
    eigenbasis.refresh([lost, found])
    assert torch.equal(lost["basis"], torch.eye(3, dtype=F64))
    torch.testing.assert_close(found["basis"].T @ found["basis"], torch.eye(3, dtype=F64))
    assert not torch.equal(found["basis"], torch.eye(3, dtype=F64))


def test_scales_stay_with_their_axes() -> None:
    state = fresh(torch.zeros(2, 3, dtype=F64))
    state["exp_avg_sq"].copy_(torch.tensor([1.0, 2.0, 3.0]).expand(2, 3))
    state["moment"].copy_(torch.tensor([1.0, 3.0, 2.0], dtype=F64).diag())  # the axes are exact, in another order
    eigenbasis.refresh([state])
    assert torch.equal(state["basis"], torch.eye(3, dtype=F64)[:, [1, 2, 0]])
    assert torch.equal(state["exp_avg_sq"], torch.tensor([2.0, 3.0, 1.0], dtype=F64).expand(2, 3))


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_a_scale_is_not_tiny_beside_the_others_of_its_output(scale: float) -> None:
    state = fresh(torch.zeros(2, 3, dtype=F64))
    sizes = torch.tensor([[1.0, 1e-17, 2e-4], [1e-6, 0.0, 1e-17]], dtype=F64) * scale
    wanted = torch.tensor([[1.0, 1e-4, 2e-4], [1e-6, 1e-10, 1e-10]], dtype=F64) * scale
    torch.testing.assert_close(eigenbasis.floored(state, sizes), wanted, rtol=1e-15, atol=0)
    assert eigenbasis.floored({}, sizes) is sizes


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
    monkeypatch.setattr(eigenbasis, "refresh", lambda states: (found.append(opt.calls), original(states)))
    weight = torch.zeros(6, 3, dtype=F64, requires_grad=True)
    opt = HorizonAdam([weight], samples=1, every=2)
    x, y = torch.randn(8, 3, dtype=F64), torch.randn(8, 6, dtype=F64)
    for _ in range(22):
        opt.step(lambda x, y: F.mse_loss(F.linear(x, weight), y, reduction="none").sum(1), x, y)
    assert found == [0, 2, 4, 6, 8, 10, 12, 14, 16, 20]


@pytest.mark.parametrize("sizes", [(0.0, 0.0, 0.0, 0.0), (1e-6, 1.0, 1e6, 1.0), (1e-20, 1e-20, 1e18, 0.0)])
def test_moments_of_any_size_leave_good_axes(sizes: tuple[float, ...]) -> None:
    state = fresh(torch.randn(6, 4))
    eigenbasis.see([state], [torch.randn(6, 4) * torch.tensor(sizes)], ONE, YES)
    mean = state["exp_avg"].clone()
    eigenbasis.refresh([state])
    torch.testing.assert_close(state["basis"].T @ state["basis"], torch.eye(4))
    torch.testing.assert_close(eigenbasis.back(state, state["exp_avg"]), mean)


def test_moments_and_axes_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a number, or by the parameters: the widest weights keep Adam's own axes."""
    leaves = [torch.zeros(2, 40), torch.zeros(7), torch.zeros(2, 30), torch.zeros(2, 4, 5)]
    assert eigenbasis.affordable(leaves) == {0, 2, 3}
    monkeypatch.setattr(eigenbasis, "_LEAST", 2 * (20**2 + 30**2))
    with caplog.at_level("INFO", "jetplane"):
        assert eigenbasis.affordable(leaves) == {2, 3}
    assert "1 of 3 weights keep Adam's own axes" in caplog.text
    monkeypatch.setattr(eigenbasis, "_TIMES", 100)
    assert eigenbasis.affordable(leaves) == {0, 2, 3}
    monkeypatch.setattr(eigenbasis, "_TIMES", 0)
    opt = HorizonAdam([leaf.requires_grad_() for leaf in leaves])
    assert ["basis" in opt.state[leaf] for leaf in leaves] == [False, False, True, True]
