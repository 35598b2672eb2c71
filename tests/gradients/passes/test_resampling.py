"""A batch that is drawn again by its slopes has the same gradient in the mean, exactly, and less noise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from exactness import Coordinates, normal
from jetplane.gradients.passes.resampling import chances, drawn_again
from jetplane.gradients.plan.noise_plan import Site

Losses = Callable[..., Tensor]
B = 5


class Chosen(Coordinates):
    """Every coordinate of every site in turn, and one number that chooses samples."""

    def __init__(self, sites: list[Site], uniform: float) -> None:
        super().__init__(sites)
        self._uniform = int(uniform * 2**32)

    def rows(self, site: int, start: int, stop: int, like: Tensor) -> Tensor:
        if site < len(self._sizes):
            return super().rows(site, start, stop, like)
        bits = self._uniform >> torch.arange(31, -1, -1) & 1
        return (2.0 * bits - 1).to(like).unsqueeze(0)

    def part(self, site: int, start: int, stop: int, like: Tensor, first: int) -> Tensor:
        """That of some samples of the batch; of the number that chooses, all of it."""
        if site == len(self._sizes):
            return self.rows(site, start, stop, like)
        whole = super().rows(site, start, stop, like.new_empty(self._sizes[site]))
        return whole[:, first : first + like.numel()].reshape(stop - start, *like.shape)


class Words(nn.Module):
    """A causal transformer with logits of each next word, or of the last one."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(6, 4), last
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(4, 6)

    def forward(self, t: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(t.shape[1], dtype=torch.float64)
        h = self.head(self.layer(self.table(t), src_mask=mask, is_causal=True))
        return h[:, -1] if self.last else h


def token_losses(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.transpose(1, 2), y, reduction="none")


def class_losses(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


WORDS = torch.randint(0, 6, (B, 4), generator=torch.Generator().manual_seed(1))
Y = torch.arange(B) % 3
CASES = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)),
        class_losses,
        (normal(B, 3), Y),
    ),
    "first convolution, in samples' own weights": (
        lambda: nn.Sequential(nn.Conv2d(1, 1, 2), nn.Tanh(), nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(50, 3)),
        class_losses,
        (normal(B, 1, 7, 7), Y),
    ),
    "losses of tokens": (lambda: Words(False), token_losses, (WORDS, WORDS.roll(1, 1))),
    "last token": (lambda: Words(True), class_losses, (WORDS, Y)),
}


def slopes_of(losses: Losses, z: Tensor, y: Tensor) -> Tensor:
    z = z.detach().requires_grad_()
    (found,) = torch.autograd.grad(losses(z, y).sum(), z)
    return found.flatten(1)


def oracle_chances(slopes: Tensor) -> Tensor:
    sizes = slopes.norm(dim=1)
    return 0.1 + 0.9 * sizes / sizes.mean()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def strata(chance: Tensor) -> list[tuple[float, float]]:
    """Numbers from 0 to 1, each with the length of the interval in which all choose the same samples."""
    ends = torch.cat([torch.zeros(1), chance.cumsum(0) % 1, torch.ones(1)]).double().sort().values
    return [(float((a + b) / 2), float(b - a)) for a, b in itertools.pairwise(ends) if b - a > 1e-9]


@pytest.mark.parametrize("control", [False, True], ids=["", "control"])
@pytest.mark.parametrize("name", CASES)
def test_in_the_mean_over_all_choices_and_coordinates_it_is_the_gradient(name: str, control: bool) -> None:
    build, loss, (x, y) = CASES[name]
    torch.manual_seed(0)
    model = build().double()
    losses = lambda x, y: loss(model(x), y)  # noqa: E731
    found = losses(x, y)
    (found.sum() / B).backward()
    wanted, named = gradients(model), dict(model.named_parameters())
    sites = jp.ForwardGradient(named).sites(losses, x, y)
    state: dict[str, Any] = {}
    if control:  # any Jacobians will do
        learned = jp.ForwardGradient(named, samples=2)
        learned(losses, x, y)
        state = learned.state_dict()
        for key in state["control"]:
            if ".jacobian." in key:
                state["control"][key] = torch.randn_like(state["control"][key])
    total = [torch.zeros_like(part) for part in wanted]
    for uniform, length in strata(oracle_chances(slopes_of(loss, model(x), y))):
        noise = Chosen(sites, uniform)
        options = {"samples": noise.count, "chunk_size": 64, "noise": lambda seed, step, noise=noise: noise}
        estimate = jp.ForwardGradient(named, control=control, resample=True, **options)
        if control:
            estimate.load_state_dict(state)
        model.zero_grad()
        mean = estimate(losses, x, y)
        torch.testing.assert_close(mean, found.detach().sum() / B)
        for part, more in zip(total, gradients(model), strict=True):
            part += length * more
    for part, exact in zip(total, wanted, strict=True):
        torch.testing.assert_close(part, exact, rtol=0, atol=1e-8)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).double()


X = normal(B, 3)


def test_parts_of_a_batch_add_up_to_the_gradient_in_the_mean_over_their_own_choices() -> None:
    model = perceptron()
    losses = lambda x, y: class_losses(model(x), y)  # noqa: E731
    losses(X, Y).mean().backward()
    wanted, slopes = gradients(model), slopes_of(class_losses, model(X), Y)
    sites = jp.ForwardGradient(model.parameters()).sites(losses, X, Y)
    total = [torch.zeros_like(part) for part in wanted]
    for part in (slice(0, 2), slice(2, 5)):
        for uniform, length in strata(oracle_chances(slopes[part])):
            noise = Chosen(sites, uniform)
            options = {"samples": noise.count, "noise": lambda seed, step, noise=noise: noise}
            estimate = jp.ForwardGradient(model.parameters(), control=False, resample=True, **options)
            model.zero_grad()
            estimate(losses, X[part], Y[part], offset=part.start, total=B)
            for place, more in zip(total, gradients(model), strict=True):
                place += length * more
    for part, exact in zip(total, wanted, strict=True):
        torch.testing.assert_close(part, exact, rtol=0, atol=1e-8)


@pytest.mark.parametrize("seed", range(4))
def test_each_sample_has_its_weight_in_the_mean(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    slopes = torch.randn(7, 2, generator=generator, dtype=torch.float64).exp() * (torch.arange(7) != 3).unsqueeze(1)
    chance = chances(slopes)
    torch.testing.assert_close(chance, oracle_chances(slopes))
    weight = torch.zeros(7, dtype=torch.float64)
    for uniform, length in strata(chance):
        chosen, weights = drawn_again(chance, torch.tensor(uniform, dtype=torch.float64))
        counts = torch.bincount(chosen, minlength=7)
        assert bool((counts >= chance.floor()).all() and (counts <= chance.ceil()).all())
        weight.index_add_(0, chosen, length * weights)
    torch.testing.assert_close(weight, torch.ones(7, dtype=torch.float64))


def test_noise_is_that_of_the_mean_slope_in_place_of_the_mean_square() -> None:
    torch.manual_seed(0)
    n = 64
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2)).double()
    x = normal(n, 6)
    y = (torch.arange(n) < 8).double()[:, None] * 4 + model(x).detach() + 0.05  # few samples are far off
    losses = lambda x, y: (model(x) - y).square().sum(1)  # noqa: E731
    model.zero_grad()
    losses(x, y).mean().backward()
    exact = torch.cat([g.flatten() for g in gradients(model)])
    errors = []
    for resample in (False, True):
        estimate = jp.ForwardGradient(model.parameters(), 2, control=False, resample=resample)
        total = torch.zeros(())
        for _ in range(40):
            model.zero_grad()
            estimate(losses, x, y)
            total = total + (torch.cat([g.flatten() for g in gradients(model)]) - exact).square().sum()
        errors.append(float(total))
    sizes = slopes_of(lambda z, y: (z - y).square().sum(1), model(x), y).norm(dim=1)
    ratio = float((sizes / oracle_chances(sizes[:, None]) * sizes).mean() / sizes.square().mean())
    assert ratio < 0.3
    assert errors[1] < 1.5 * ratio * errors[0]


def test_chunks_and_copies_are_the_same() -> None:
    build, loss, (x, y) = CASES["losses of tokens"]
    found = []
    for options in ({}, {"chunk_size": 1}):
        torch.manual_seed(0)
        model = build().double()
        estimate = jp.ForwardGradient(model.parameters(), 3, resample=True, **options)
        for _ in range(3):
            model.zero_grad()
            estimate(lambda x, y, model=model: loss(model(x), y), x, y)
        found.append([*gradients(model), *estimate.state_dict()["control"].values()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", ["perceptron", "first convolution, in samples' own weights"])
def test_compiled_it_is_the_same(name: str) -> None:
    build, loss, (x, y) = CASES[name]
    found = []
    for compile in (False, True):
        torch.manual_seed(0)
        model = build().double()
        estimate = jp.ForwardGradient(model.parameters(), 3, resample=True, compile=compile)
        losses = lambda x, y, model=model: loss(model(x), y)  # noqa: E731
        means = []
        for _ in range(3):
            model.zero_grad()
            means.append(estimate(losses, x, y))
        plain = jp.ForwardGradient(model.parameters(), 3)
        found.append([*means, *gradients(model), *estimate.state_dict()["control"].values()])
        before = gradients(model)
        model.zero_grad()
        plain(losses, x, y)
        assert any(not torch.equal(one, other) for one, other in zip(before, gradients(model), strict=True))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def same_as_without(losses: Losses, model: nn.Module, *batch: Any, **options: Any) -> bool:
    found = []
    for resample in (False, True):
        torch.manual_seed(3)
        estimate = jp.ForwardGradient(model.parameters(), 2, control=False, resample=resample)
        model.zero_grad()
        loss = estimate(losses, *batch, **options)
        found.append([loss, *gradients(model)])
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_batches_that_are_no_samples_are_taken_as_they_are() -> None:
    model = perceptron()
    dropping = nn.Sequential(*model[:2], nn.Dropout(0.5), *model[2:])
    norms = nn.Sequential(*model[:1], nn.BatchNorm1d(6).double(), *model[1:])
    assert not same_as_without(lambda x, y: class_losses(model(x), y), model, X, Y)
    assert same_as_without(lambda: class_losses(model(X), Y), model)  # data from outside
    assert same_as_without(lambda x: class_losses(model(x), Y), model, X)  # some of it
    assert same_as_without(lambda x, y: class_losses(model(x - x.mean(0)), y), model, X, Y)  # by the data alone
    assert same_as_without(lambda x, y: class_losses(model(x)[y.argsort().argsort()], y), model, X, Y)
    assert same_as_without(lambda x, y: class_losses(dropping(x), y), model, X, Y)
    assert same_as_without(lambda x, y: class_losses(norms(x), y), norms, X, Y)
    assert same_as_without(lambda x, y: class_losses(model(x), y), model, X[:1], Y[:1])


def test_a_program_that_does_other_things_with_other_samples_is_taken_as_it_is() -> None:
    model = perceptron()

    def refusing(x: Tensor, y: Tensor) -> Tensor:
        assert len(x.unique(dim=0)) == len(x)
        return class_losses(model(x), y)

    assert same_as_without(refusing, model, X, Y)
    calls = []

    def turning(x: Tensor, y: Tensor) -> Tensor:  # what is drawn in the end is another batch than was looked at
        calls.append(x)
        twice = len(x.unique(dim=0)) < len(x) and len(calls) > 3
        h = model[1](model[0](x))
        return class_losses(model[2:](h + 0.0 if twice else h), y)

    estimate = jp.ForwardGradient(model.parameters(), 2, resample=True)
    for _ in range(3):
        assert torch.isfinite(estimate(turning, X, Y))


def test_what_comes_with_the_losses_is_that_of_the_batch() -> None:
    model = perceptron()

    def with_logits(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = model(x)
        return class_losses(z, y), z

    estimate = jp.ForwardGradient(model.parameters(), 2, resample=True)
    for _ in range(2):
        mean, z = estimate(with_logits, X, Y, has_aux=True)
        torch.testing.assert_close(z, model(X).detach())
        torch.testing.assert_close(mean, class_losses(model(X), Y).mean().detach())


def test_what_is_not_finite_is_told() -> None:
    model, x = perceptron(), X.clone()
    estimate = jp.ForwardGradient(model.parameters(), 2, resample=True)
    estimate(lambda x, y: class_losses(model(x), y), x, Y)
    x[2] = torch.nan
    model.zero_grad()
    assert estimate(lambda x, y: class_losses(model(x), y), x, Y).isnan()
    assert all(not bool(grad.isfinite().all()) for grad in gradients(model))


def test_samples_without_any_slope_are_alike() -> None:
    model = perceptron()
    estimate = jp.ForwardGradient(model.parameters(), 2, resample=True)
    estimate(lambda x: (model(x) * 0).square().sum(1), X)
    assert all(bool((grad == 0).all()) for grad in gradients(model))
