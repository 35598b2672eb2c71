"""Noise in each sample's own weight: exactly unbiased, where it is used, and less noisy there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import jetplane as jp
from exactness import LABELS, B, check_exact, normal
from jetplane.gradients.plan.own_weights import OwnWeights


def losses_of(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: F.cross_entropy(module(x), y, reduction="none")


def images(first: nn.Module, *more: nn.Module) -> nn.Module:
    """A first convolution, and what makes three logits of it."""
    return nn.Sequential(first, nn.ReLU(), *more, nn.Flatten(), nn.LazyLinear(3))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "images": (lambda: images(nn.Conv2d(1, 2, 3)), (1, 11, 11)),
    "without bias": (lambda: images(nn.Conv2d(2, 2, (2, 3), bias=False)), (2, 11, 12)),
    "stride, padding, dilation": (lambda: images(nn.Conv2d(1, 2, 3, 2, 3, 2)), (1, 16, 16)),
    "pooled": (lambda: images(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2)), (1, 15, 15)),
    "sequences": (lambda: images(nn.Conv1d(2, 2, 3, padding=1)), (2, 60)),
    "volumes": (lambda: images(nn.Conv3d(1, 1, 2, dilation=2)), (1, 7, 7, 6)),
    "weight norm": (lambda: images(weight_norm(nn.Conv2d(1, 2, 3))), (1, 11, 11)),
    "the second of two": (
        lambda: nn.Sequential(nn.Conv2d(1, 1, 2), nn.Tanh(), images(nn.Conv2d(1, 1, 2), nn.AvgPool2d(2))),
        (1, 9, 9),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_exact_with_every_coordinate_in_turn(name: str) -> None:
    torch.manual_seed(0)
    build, shape = CASES[name]
    module, x = build().double(), normal(B, *shape) + 0.5
    module(x)
    sites = check_exact(module, losses_of(module), x, LABELS)
    assert any(site.own is not None for site in sites), name


class Shared(nn.Module):
    """One convolution, called twice, the second time on what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 1, 3, padding=1), nn.Linear(81, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv(self.conv(x).tanh()).tanh().flatten(1))


def test_a_shared_weight_has_noise_of_its_own_for_each_call() -> None:
    torch.manual_seed(0)
    module = Shared().double()
    sites = check_exact(module, losses_of(module), normal(B, 1, 9, 9), LABELS)
    assert [site.shape for site in sites] == [(B, 10), (B, 10)]


def test_samples_that_are_coupled_get_the_sum_of_all_losses() -> None:
    torch.manual_seed(0)
    module, x = images(nn.Conv2d(1, 2, 3)).double(), normal(B, 1, 11, 11)
    module(x)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        z = module(x)
        return F.cross_entropy(z - z.mean(0), y, reduction="none")

    (site,) = check_exact(module, loss_fn, x, LABELS, every_site=False)
    assert site.own is not None and site.coupled


@pytest.mark.parametrize(
    "first, shape",
    [
        (nn.Conv2d(2, 4, 3, groups=2), (2, 12, 12)),
        (nn.ConvTranspose2d(1, 2, 3), (1, 12, 12)),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2)), (1, 12, 12)),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), (1, 12, 12)),
        (nn.Conv2d(1, 8, 3), (1, 7, 7)),  # 200 numbers, 80 of them the weight's
    ],
    ids=["groups", "transposed", "group norm", "batch norm", "few outputs"],
)
def test_other_layers_keep_the_noise_behind_them(first: nn.Module, shape: tuple[int, ...]) -> None:
    module, x = images(first), torch.randn(B, *shape)
    module(x)
    sites = jp.ForwardGradient(module.parameters()).sites(losses_of(module), x, LABELS)
    assert sites and all(site.own is None for site in sites)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_noise_at_the_output_has_about_unit_variance_whatever_the_scale_of_the_input(scale: float) -> None:
    torch.manual_seed(0)
    conv, x = nn.Conv2d(3, 4, 3, bias=False), torch.randn(64, 3, 10, 10) + 2
    own = OwnWeights(conv.weight.shape, False)
    noise = torch.randn(8, 64, own.numbers)
    done, scaled = _done(conv, x), _done(conv, scale * x)
    rows = own.apply(done, noise, own.shape(done))
    assert rows.shape == (8, 64, 4, 8, 8) and 0.6 < float(rows.square().mean()) < 1  # the ridge takes a part
    torch.testing.assert_close(own.apply(scaled, noise, own.shape(scaled)), rows, rtol=1e-4, atol=1e-4)


def test_a_batch_of_zeros_gives_zeros() -> None:
    conv, x = nn.Conv2d(3, 4, 3, bias=False), torch.zeros(2, 3, 10, 10)
    own, done = OwnWeights(conv.weight.shape, False), _done(conv, x)
    noise = torch.randn(2, 2, own.numbers)
    shape = own.shape(done)
    assert not own.apply(done, noise, shape).any()
    (gradient,) = own.undo(noise[0], shape).values()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("cast", [False, True], ids=["half precision", "autocast"])
def test_in_half_precision_it_is_the_gradient_in_the_mean(cast: bool) -> None:
    torch.manual_seed(0)
    module, x = images(nn.Conv2d(1, 2, 3)), torch.randn(16, 1, 12, 12)
    module(x)
    if not cast:
        module, x = module.bfloat16(), x.bfloat16()

    def loss_fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            return F.cross_entropy(module(x).float(), torch.arange(16) % 3, reduction="none")

    loss_fn(x).mean().backward()
    exact = module[0].weight.grad.float().flatten()
    module.zero_grad()
    estimate = jp.ForwardGradient(module.parameters(), samples=512)
    assert estimate.sites(loss_fn, x)[0].own is not None
    estimate(loss_fn, x)
    found = module[0].weight.grad.float().flatten()
    assert float((found - exact).norm() / exact.norm()) < 0.3  # of the noise: sqrt(20 / 512) of a sample's


def test_it_is_less_noisy_than_noise_at_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that are much alike, as those of images are."""
    torch.manual_seed(0)
    module = images(nn.Conv2d(1, 4, 3))
    x = torch.randn(64, 1, 1, 1) + F.interpolate(torch.randn(64, 1, 4, 4), size=16, mode="bilinear")
    y = torch.randint(3, (64,))
    module(x)
    F.cross_entropy(module(x), y).backward()
    exact = module[0].weight.grad.clone()

    def error() -> float:
        errors = []
        for seed in range(20):
            module.zero_grad()
            jp.forward_gradient(losses_of(module), module.parameters(), x, y, samples=4, seed=seed, control=False)
            errors.append((module[0].weight.grad - exact).square().sum())
        return float(torch.stack(errors).mean())

    own = error()
    jp.forward_gradient(losses_of(module), module.parameters(), x, y)
    monkeypatch.setattr(OwnWeights, "of", staticmethod(lambda *_: None))
    other = [p.detach().clone().requires_grad_() for p in module.parameters()]  # for which nothing is kept
    module[0].weight, module[0].bias, module[-1].weight, module[-1].bias = map(nn.Parameter, other)
    assert own < 0.3 * error()


def _done(conv: nn.Conv2d, x: Tensor):  # type: ignore[no-untyped-def]
    from jetplane.gradients.program.done import Done

    args = (x, conv.weight.detach(), None, conv.stride, conv.padding, conv.dilation, False, (0, 0), 1)
    return Done(torch.ops.aten.convolution.default, args, {}, torch.ops.aten.convolution.default(*args))
