"""Batch norm in training: samples are coupled by its statistics alone, and each keeps its own loss."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from jetplane.gradients.noise.statistics import Statistics
from jetplane.gradients.plan.noise_plan import NoisePlan

F64 = torch.float64


def classify(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: F.cross_entropy(model(x), y, reduction="none")


def backprop(model: nn.Module, *batch: Tensor) -> Tensor:
    model.zero_grad()
    classify(model)(*batch).mean().backward()
    return flat(model)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def estimated(model: nn.Module, *batch: Tensor, **options: Any) -> Tensor:
    model.zero_grad()
    with jp.forward_only():
        jp.ForwardGradient(model.parameters(), control=False, **{"samples": 1} | options)(classify(model), *batch)
    return flat(model)


class Given:
    """Signs that are given, for J = 1."""

    def __init__(self, signs: tuple[float, ...], sizes: list[int]) -> None:
        self._signs, self._sizes = torch.tensor(signs), sizes

    def rows(self, site: int, start: int, stop: int, like: Tensor) -> Tensor:
        first = sum(self._sizes[:site])
        return self._signs[first : first + self._sizes[site]].to(like).reshape(1, *like.shape)


def jacobians(model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
    """The state of a control variate, with random numbers for what it has learned."""
    one = jp.ForwardGradient(model.parameters())
    one(classify(model), *batch)
    state: dict[str, Tensor] = one.state_dict()["control"]
    return {key: torch.randn_like(part) if "jacobian" in key else part for key, part in state.items()}


@pytest.mark.parametrize("predicted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_mean_over_all_signs_is_the_gradient(predicted: bool) -> None:
    """The same noise estimates the statistics' derivative and is multiplied by it: the mean must not notice."""
    model = nn.Sequential(
        *(nn.Linear(2, 1), nn.BatchNorm1d(1), nn.Tanh(), nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Tanh()),
        nn.Linear(2, 2),
    ).double()
    x, y = torch.randn(3, 2, dtype=F64), torch.tensor([0, 1, 1])
    wanted = backprop(model, x, y)
    sites = jp.ForwardGradient(model.parameters()).sites(classify(model), x, y)
    sizes = [site.shape.numel() for site in sites]
    assert sizes == [3, 6] and all(site.layout is not None and site.coupled for site in sites)
    state = jacobians(model, x, y) if predicted else {}
    total = torch.zeros_like(wanted)
    patterns = list(itertools.product((-1.0, 1.0), repeat=sum(sizes)))
    one = jp.ForwardGradient(model.parameters(), samples=1, control=predicted, batch_norm="exact")  # keeps its plan
    for signs in patterns:
        if predicted:  # by any Jacobians, for they learn from each call
            one.load_state_dict({"seed": 0, "step": 0, "control": state})
        one._noise = lambda seed, step, signs=signs: Given(signs, sizes)
        model.zero_grad()
        one(classify(model), x, y)
        total += flat(model)
    torch.testing.assert_close(total / len(patterns), wanted, rtol=0, atol=1e-10)


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()),
        nn.Linear(16, 3),
    ).double()


def batch(samples: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 6, generator=made, dtype=F64)
    return x, x[:, :3].argmax(1)


def test_noise_shrinks_as_the_batch_grows() -> None:
    # multiplied by the sum of all losses, each sample's noise would be as large as the batch
    model, errors = network(), []
    for samples in (32, 512):
        wanted = backprop(model, *batch(samples))
        found = [estimated(model, *batch(samples), samples=4, seed=seed) for seed in range(8)]
        errors.append(torch.stack([(one - wanted).norm() / wanted.norm() for one in found]).mean())
    assert errors[1] < 0.4 * errors[0]  # a quarter, by the root of 16


@pytest.mark.parametrize("options", [{"chunk_size": 1}, {"chunk_size": 2}, {"memory": "64MiB"}])
def test_chunks_give_the_same(options: dict[str, Any]) -> None:
    model, data = network(), batch(8)
    whole = estimated(model, *data, samples=3)
    torch.testing.assert_close(estimated(model, *data, samples=3, **options), whole, rtol=1e-12, atol=1e-14)


def test_running_statistics_are_updated_once() -> None:
    model, data = network(), batch(8)
    one = model[1]
    assert isinstance(one, nn.BatchNorm1d) and one.num_batches_tracked is not None and one.running_mean is not None
    before = one.running_mean.clone()
    estimated(model, *data, samples=3, chunk_size=1)
    assert int(one.num_batches_tracked) == 1
    mean = model[0](data[0]).mean(0)
    torch.testing.assert_close(one.running_mean, 0.9 * before + 0.1 * mean.detach())


def test_a_norm_that_is_used_twice_is_followed_each_time() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.out = nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.a(x)).relu()
            return self.out(self.norm(self.a(h)).relu())

    model, data = Twice().double(), batch(64)
    wanted = backprop(model, *data)
    found = torch.stack([estimated(model, *data, samples=64, seed=seed) for seed in range(20)]).mean(0)
    assert F.cosine_similarity(found, wanted, dim=0) > 0.98


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_dtypes(dtype: torch.dtype) -> None:
    model, data = network(), batch(64)
    wanted = estimated(model, *data, samples=2)
    found = estimated(model.to(dtype), data[0].to(dtype), data[1], samples=2).double()
    # eight bits: 0.01 to 0.1 for six initial values, as some units go on or off
    assert (found - wanted).norm() < (1e-6 if dtype == torch.float32 else 0.1) * wanted.norm()


def test_it_trains_under_the_guard() -> None:
    torch.manual_seed(0)
    model, (x, y) = network().float(), batch(512)
    x = x.float()
    opt = jp.optim.HorizonAdam(model.parameters())
    with jp.forward_only():
        for step in range(150):
            chosen = torch.arange(64) + 64 * (step % 8)
            opt.step(classify(model), x[chosen], y[chosen])
    assert (model(x).argmax(1) == y).float().mean() > 0.9


def deep(depth: int, width: int = 16) -> nn.Sequential:
    """That many layers with batch norm."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 4)).double()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(self.two(F.relu(self.first(self.one(x))))))


def residual(blocks: int) -> nn.Sequential:
    body = [Block() for _ in range(blocks)]
    return nn.Sequential(nn.Unflatten(1, (4, 2, 2)), *body, nn.Flatten(), nn.Linear(16, 4)).double()


def relative(model: nn.Module, calls: int = 4, **options: Any) -> float:
    """The error of estimates, in the mean over the last half of some calls with batches of 128."""
    estimate, errors = jp.ForwardGradient(model.parameters(), 4, **options), []
    for call in range(calls):
        x = torch.randn(128, 16, dtype=F64, generator=torch.Generator().manual_seed(call))
        wanted = backprop(model, x, x[:, :4].argmax(1))
        model.zero_grad()
        estimate(classify(model), x, x[:, :4].argmax(1))
        errors.append(float((flat(model) - wanted).norm() / wanted.norm()))
    return sum(errors[calls // 2 :]) / (calls - calls // 2)


@pytest.mark.parametrize("make, size", [(deep, 12), (residual, 4)])
def test_noise_does_not_grow_from_norm_to_norm(
    make: Callable[[int], nn.Module], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(size)
    found = relative(model)
    norms = [one for one in model.modules() if isinstance(one, nn.BatchNorm1d | nn.BatchNorm2d)]

    def exact(own: Any, number: int, site: Any, scalars: Tensor) -> Tensor:
        """d, by backprop of the same batch: the gradients of a norm's bias and weight."""
        norm = norms[sorted(own._norms).index(number)]
        return torch.cat([kept[norm.bias], kept[norm.weight]])

    kept: dict[Tensor, Tensor] = {}
    backward = Tensor.backward

    def looked_at(loss: Tensor) -> None:
        backward(loss)
        kept.update({param: param.grad.clone() for param in model.parameters() if param.grad is not None})

    monkeypatch.setattr(Tensor, "backward", looked_at)
    monkeypatch.setattr(Statistics, "_sums", exact)
    assert found < 2 * relative(model, batch_norm="exact")


@pytest.mark.filterwarnings("ignore:the estimate is mostly noise")
@pytest.mark.parametrize("depth, same", [(2, True), (3, False)])
def test_few_norms_are_exact_by_themselves(depth: int, same: bool) -> None:
    torch.manual_seed(0)
    model, x = deep(depth), torch.randn(8, 16, dtype=F64)
    found = [estimated(model, x, torch.arange(8) % 4, samples=1, batch_norm=how) for how in ("bounded", "exact")]
    assert torch.equal(*found) == same


def test_what_the_norms_add_is_bounded_and_nothing_below_the_bound_is_changed() -> None:
    model = deep(3)
    x, y = torch.randn(8, 16, dtype=F64), torch.arange(8) % 4
    (plan,) = _plans(model, x, y)
    one, direct = Statistics(plan), torch.randn(5, 8, dtype=F64)
    one._power = direct.square().mean()
    large, small = 10 * direct, 1e-3 * direct
    bounded = one._damped(large)
    torch.testing.assert_close(bounded.square().mean(), one._power * 0.25 / 3)
    torch.testing.assert_close(
        F.cosine_similarity(bounded.flatten(), large.flatten(), dim=0), torch.ones((), dtype=F64)
    )
    assert torch.equal(one._damped(small), small)


def _plans(model: nn.Module, *batch: Tensor) -> list[NoisePlan]:
    estimate = jp.ForwardGradient(model.parameters())
    estimate.sites(classify(model), *batch)
    return [plan for plans in estimate._known.plans._by_form.values() for plan in plans]


def test_an_estimate_that_is_mostly_noise_is_told_of_once() -> None:
    torch.manual_seed(0)
    model, x = deep(10), torch.randn(64, 16, dtype=F64)
    batch = x, x[:, :4].argmax(1)
    exact = jp.ForwardGradient(model.parameters(), 2, batch_norm="exact", probe_every=1)
    said = r"mostly noise: the statistics of 10 batch norms, .* times the power of all else; expected more samples"
    with pytest.warns(UserWarning, match=said) as seen:
        exact(classify(model), *batch)
        exact(classify(model), *batch)
    assert len(seen) == 1 and seen[0].filename == __file__
    jp.ForwardGradient(model.parameters(), 2)(classify(model), *batch)  # warnings are errors here


def test_another_way_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_norm is 'none'; expected one of 'bounded', 'exact'."):
        jp.ForwardGradient([torch.ones(1, requires_grad=True)], batch_norm="none")


def test_a_resumed_run_goes_on_bit_by_bit() -> None:
    torch.manual_seed(0)
    model, x = deep(4).float(), torch.randn(64, 16)
    batch = x, x[:, :4].argmax(1)
    opt = jp.optim.HorizonAdam(model.parameters(), samples=2)
    for _ in range(5):
        opt.step(classify(model), *batch)
    state, start = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    ends = []
    for one in (opt, jp.optim.HorizonAdam(model.parameters(), samples=2)):
        model.load_state_dict(start)
        one.load_state_dict(copy.deepcopy(state))
        for _ in range(5):
            one.step(classify(model), *batch)
        ends.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    assert torch.equal(*ends)
