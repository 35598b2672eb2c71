"""Forward gradients of models as researchers write them: equal to backprop's once noise takes every coordinate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exactness import LABELS, B, check_exact, normal

Made = tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]


class Weights(nn.Module):
    """Parameters by name, for programs that are functions of them."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def tied() -> Made:
    """One weight in three places, one of them turned."""
    model = Weights(w=(4, 4))
    return (
        model,
        lambda x: F.cross_entropy(torch.tanh(torch.tanh(x @ model.w) @ model.w.T) @ model.w, LABELS, reduction="none"),
        (normal(B, 4),),
    )


def parts_of_one() -> Made:
    """All weights are views of one parameter."""
    model = Weights(flat=(35,))

    def losses(x: Tensor) -> Tensor:
        h = torch.tanh(x @ model.flat[:20].view(4, 5))
        return F.cross_entropy(h @ model.flat[20:].view(5, 3), LABELS, reduction="none")

    return model, losses, (normal(B, 4),)


def language_model() -> Made:
    """The last layer is the embedding."""
    model = nn.ModuleDict({"tokens": nn.Embedding(7, 4), "layer": nn.Linear(4, 4)})

    def losses(tokens: Tensor) -> Tensor:
        h = model["layer"](model["tokens"](tokens[:, :-1])).tanh()
        logits = F.linear(h, model["tokens"].weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(B, -1).sum(1)

    return model, losses, (torch.randint(0, 7, (B, 4)),)


def autoencoder() -> Made:
    """With noise of its own inside."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(2, 4)])

    def losses(x: Tensor) -> Tensor:
        mean, spread = model[0](x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return (model[1](z.tanh()) - x).square().sum(1) - 0.5 * (1 + spread - mean**2 - spread.exp()).sum(1)

    return model, losses, (normal(B, 4),)


def flow() -> Made:
    model = nn.ModuleList([nn.Linear(2, 4), nn.Linear(2, 4)])

    def losses(x: Tensor) -> Tensor:
        first, second = x.chunk(2, 1)
        spread: Tensor | float = 0.0
        for layer in model:
            scale, shift = layer(first).tanh().chunk(2, 1)
            first, second, spread = second * scale.exp() + shift, first, spread + scale.sum(1)
        return 0.5 * (first.square() + second.square()).sum(1) - spread

    return model, losses, (normal(B, 4),)


def equation() -> Made:
    """A derivative by the inputs inside."""
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))

    def losses(x: Tensor) -> Tensor:
        value, slope = torch.func.jvp(lambda x: model(x).squeeze(1), (x,), (torch.ones_like(x),))
        return (slope - value).square()

    return model, losses, (normal(B, 2),)


def hypernetwork() -> Made:
    model = nn.ModuleList([nn.Linear(2, 20), nn.Linear(5, 3)])

    def losses(x: Tensor, y: Tensor) -> Tensor:
        weights = model[0](y).view(-1, 5, 4)
        return F.cross_entropy(model[1](torch.einsum("bij,bj->bi", weights, x).tanh()), LABELS, reduction="none")

    return model, losses, (normal(B, 4), normal(B, 2))


def pairs() -> Made:
    """Both halves of what a network makes of two batches."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def losses(x: Tensor, y: Tensor) -> Tensor:
        one, other = model(torch.cat([x, y])).chunk(2)
        return (one - other).square().sum(1) + one.sin().sum(1)

    return model, losses, (normal(B, 4), normal(B, 4))


def ensemble() -> Made:
    model = Weights(w=(3, 4, 5), v=(3, 5, 3))

    def losses(x: Tensor) -> Tensor:
        logits = torch.func.vmap(lambda w, v: torch.tanh(x @ w) @ v)(model.w, model.v).mean(0)
        return F.cross_entropy(logits, LABELS, reduction="none")

    return model, losses, (normal(B, 4),)


def rounded() -> Made:
    """Straight-through estimators of activations and weights."""
    model = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 3)])

    def losses(x: Tensor) -> Tensor:
        h = model[0](x)
        weight = model[1].weight
        signs = weight + (weight.sign() * weight.abs().mean() - weight).detach()
        logits = F.linear((h + ((h * 4).round() / 4 - h).detach()).tanh(), signs, model[1].bias)
        return F.cross_entropy(logits, LABELS, reduction="none")

    return model, losses, (normal(B, 4),)


def regularised() -> Made:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def losses(x: Tensor) -> Tensor:
        decay = 0.1 * sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(x), LABELS, reduction="none") + decay

    return model, losses, (normal(B, 4),)


PROGRAMS = (tied, parts_of_one, language_model, autoencoder, flow, equation, hypernetwork, pairs, ensemble, rounded,
            regularised)  # fmt: skip


@pytest.mark.parametrize("make", PROGRAMS, ids=[make.__name__ for make in PROGRAMS])
def test_the_gradient_of_a_program_of_research_is_exact(make: Callable[[], Made]) -> None:
    torch.manual_seed(0)
    model, losses, batch = make()
    check_exact(model.double(), losses, *batch, every_site=False)
