"""A small classifier, its batch and its forward gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(3)), torch.arange(8) % 3


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def classify(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: F.cross_entropy(model(x), y, reduction="none")


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def backprop(model: nn.Module, loss_fn: Callable[..., Tensor], *batch: Tensor) -> Tensor:
    model.zero_grad()
    loss_fn(*batch).mean().backward()
    result = gradient(model).clone()
    model.zero_grad()
    return result


def estimated(estimate: jp.ForwardGradient, model: nn.Module, *batch: Tensor) -> Tensor:
    model.zero_grad()
    with jp.forward_only():
        estimate(classify(model), *batch)
    return gradient(model).clone()


def learned(estimate: jp.ForwardGradient) -> dict[str, Tensor]:
    """The state, without the name of the only program that there is."""
    state = estimate.state_dict()["control"]
    assert len({key.partition(".")[0] for key in state}) == 1
    return {key.partition(".")[2]: tensor for key, tensor in state.items()}


def off(model: nn.Module, loss_fn: Callable[..., Tensor], *batch: Tensor, **options: Any) -> bool:
    estimate = jp.ForwardGradient(model.parameters(), **options)
    estimate(loss_fn, *batch)
    return not any(".jacobian." in key for key in estimate.state_dict()["control"])
