"""Batch norm in training: samples are coupled by its statistics alone, and each keeps its own loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp

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
        jp.ForwardGradient(model.parameters(), control=False, **options)(classify(model), *batch)
    return flat(model)


class Given:
    """Signs that are given, for J = 1."""

    def __init__(self, signs: tuple[float, ...], sizes: list[int]) -> None:
        self._signs, self._sizes = torch.tensor(signs), sizes

    def rows(self, site: int, start: int, stop: int, like: Tensor) -> Tensor:
        first = sum(self._sizes[:site])
        return self._signs[first : first + self._sizes[site]].to(like).reshape(1, *like.shape)


def test_the_mean_over_all_signs_is_the_gradient() -> None:
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
    total = torch.zeros_like(wanted)
    patterns = list(itertools.product((-1.0, 1.0), repeat=sum(sizes)))
    one = jp.ForwardGradient(model.parameters(), control=False)  # keeps its plan
    for signs in patterns:
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
