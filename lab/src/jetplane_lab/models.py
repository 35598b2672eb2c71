"""The paper's two networks for 28 x 28 digits, as plain modules with torch's default initialisation."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["CNN", "MODELS", "LogisticRegression", "build", "find"]


class LogisticRegression(nn.Module):
    """Softmax regression on the 784 pixels: 7,850 parameters.

    Example:
        >>> LogisticRegression()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
        >>> sum(p.numel() for p in LogisticRegression().parameters())
        7850
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(28 * 28, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, 10) of images (N, 1, 28, 28)."""
        return self.linear(images.flatten(1))


class CNN(nn.Module):
    """Two convolutions with max-pooling and two linear layers: 431,080 parameters.

    Example:
        >>> CNN()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
        >>> sum(p.numel() for p in CNN().parameters())
        431080
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 20, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(800, 500),
            nn.ReLU(),
            nn.Linear(500, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, 10) of images (N, 1, 28, 28)."""
        return self.layers(images)


MODELS: dict[str, Callable[[], nn.Module]] = {"logistic-regression": LogisticRegression, "cnn": CNN}


def find(name: str) -> Callable[[], nn.Module]:
    """The class of a model's name."""
    if name not in MODELS:
        close = difflib.get_close_matches(name, MODELS, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"model is {name!r}; {hint}expected one of {', '.join(MODELS)}.")
    return MODELS[name]


def build(name: str, seed: int) -> nn.Module:
    """The model with initial values that are a function of ``seed``; torch's generators stay as they are.

    Example:
        >>> before = torch.get_rng_state()
        >>> a, b = build("logistic-regression", 3), build("logistic-regression", 3)
        >>> assert torch.equal(a.linear.weight, b.linear.weight) and torch.equal(torch.get_rng_state(), before)
    """
    make = find(name)
    with torch.random.fork_rng(devices=[]):
        # not torch.manual_seed: it would seed the generators of all CUDA devices, which the fork does not restore
        torch.default_generator.manual_seed(seed)
        return make()
