"""The paper's two networks for 28 x 28 digits, and two for CIFAR-10: plain modules, torch's default initialisation."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["CNN", "MODELS", "ColourCNN", "LogisticRegression", "ResNet20", "build", "find", "shape"]


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


class ColourCNN(nn.Module):
    """Three convolutions with max-pooling and two linear layers for 32 x 32 colours: 620,362 parameters.

    Example:
        >>> ColourCNN()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
        >>> sum(p.numel() for p in ColourCNN().parameters())
        620362
    """

    def __init__(self) -> None:
        super().__init__()
        widths = 3, 32, 64, 128
        blocks = [
            nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            for before, after in pairwise(widths)
        ]
        self.layers = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128 * 4 * 4, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, 10) of images (N, 3, 32, 32)."""
        return self.layers(images)


class ResNet20(nn.Module):
    """The residual network of He et al. (2015) for CIFAR-10, with batch norm: 20 layers, 269,722 parameters.

    Where the width doubles, the shortcut takes every second pixel and fills the new channels with zeros.

    Example:
        >>> ResNet20()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
        >>> sum(p.numel() for p in ResNet20().parameters())
        269722
    """

    def __init__(self) -> None:
        super().__init__()
        widths = (16,) * 4 + (32,) * 3 + (64,) * 3
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(*(_Residual(before, after) for before, after in pairwise(widths)))
        self.last = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, 10) of images (N, 3, 32, 32)."""
        return self.last(self.blocks(self.first(images)).mean((2, 3)))


class _Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.more, stride = after - before, after // before
        self.layers = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )

    def forward(self, x: Tensor) -> Tensor:
        short = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.more)) if self.more else x
        return torch.relu(self.layers(x) + short)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "logistic-regression": LogisticRegression,
    "cnn": CNN,
    "colour-cnn": ColourCNN,
    "resnet-20": ResNet20,
}
_COLOURED = ("colour-cnn", "resnet-20")


def shape(name: str) -> tuple[int, int, int]:
    """Of the images that a model takes."""
    return (3, 32, 32) if name in _COLOURED else (1, 28, 28)


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
