"""The problems that are timed: a model, a batch, its loss, and K directions, all drawn from fixed seeds on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from jetplane_lab.models import build

__all__ = ["MODELS", "Derivatives", "Params", "Problem", "has_depth"]

Params = dict[str, Tensor]

MODELS = ("cnn", "logistic-regression", "mlp", "tanh-regression", "rosenbrock")
WIDTH = 256  # of the hidden layers of an MLP
_SEED = 0


class Derivatives(NamedTuple):
    """What every system computes."""

    loss: Tensor  # ()
    slope: Tensor  # (K,): V g
    curvature: Tensor  # (K, K): V H V^T


def has_depth(model: str) -> bool:
    """Whether a model is built to a depth."""
    return model == "mlp"


class TanhRegression(nn.Module):
    """tanh(x W), one matrix of weights: what Taylor-mode packages with few operations can run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(784, 10) / 28)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh()


class Rosenbrock(nn.Module):
    """The Rosenbrock function of two parameters; it has no data."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.tensor([-1.2, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.point.unbind()
        return 100 * (b - a * a) ** 2 + (1 - a) ** 2


def _mlp(depth: int) -> nn.Module:
    if depth < 1:
        raise ValueError(f"the depth of the MLP is {depth}; expected at least 1 hidden layer.")
    layers: list[nn.Module] = [nn.Linear(784, WIDTH), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def _squares(output: Tensor, target: Tensor) -> Tensor:
    error = output - target
    return (error * error).sum(0).sum(0) * (1 / len(target))


class Problem:
    """Model, batch and directions at one precision on one device.

    Example:
        >>> problem = Problem("rosenbrock", k=2, batch=1)
        >>> loss = problem.loss_of(problem.params, problem.x, problem.y)
        >>> assert abs(loss.item() - 24.2) < 1e-5
    """

    def __init__(
        self,
        model: str,
        k: int,
        batch: int,
        depth: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        if model not in MODELS:
            raise ValueError(f"the model is {model!r}; expected one of {', '.join(MODELS)}.")
        self.name, self.k, self.depth = model, k, depth
        generator = torch.Generator().manual_seed(_SEED)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            own: dict[str, Callable[[], nn.Module]] = {
                "mlp": lambda: _mlp(depth),
                "tanh-regression": TanhRegression,
                "rosenbrock": Rosenbrock,
            }
            self.model = (own[model]() if model in own else build(model, _SEED)).to(device, dtype)
        shape = (batch, 1, 28, 28) if model == "cnn" else (batch, 784)
        self.x = torch.randn(shape, generator=generator).to(device, dtype)
        if model == "tanh-regression":
            self.y = torch.randn(batch, 10, generator=generator).to(device, dtype)
        else:
            self.y = torch.randint(0, 10, (batch,), generator=generator).to(device)
        if model == "rosenbrock":
            self.x, self.y = self.x[:0], self.y[:0]
        self.params: Params = dict(self.model.named_parameters())
        self.directions: Params = {
            name: torch.randn((k, *p.shape), generator=generator).to(device, dtype) for name, p in self.params.items()
        }

    @property
    def constants(self) -> Params:
        """The parameters without autograd, for systems that take them as arguments."""
        return {name: p.detach() for name, p in self.params.items()}

    def loss(self) -> Tensor:
        """The loss of the module as it is."""
        return self.loss_on(self.x, self.y)

    def loss_on(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of the module as it is, on a batch."""
        return self._of(self.model(x), y)

    def loss_of(self, params: Params, x: Tensor, y: Tensor) -> Tensor:
        """The loss as a function of everything."""
        return self._of(functional_call(self.model, params, (x,)), y)

    def _of(self, output: Tensor, y: Tensor) -> Tensor:
        if self.name == "rosenbrock":
            return output
        return _squares(output, y) if self.name == "tanh-regression" else F.cross_entropy(output, y)
