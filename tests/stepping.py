"""What tests of the optimizers share: problems, formulas from autograd, and runs of some steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from cases import F64
from jetplane.directions import Family, Plane
from jetplane.optim import FGD, FoMoH, FoMoHBP, FoMoHKD, Newton

X = torch.sin(torch.arange(24, dtype=F64) ** 2).reshape(8, 3)

Y = torch.linspace(0, 1, 8, dtype=F64).reshape(8, 1)


def leaf(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=F64, requires_grad=True)


def rosenbrock(x: Tensor) -> Tensor:
    return ((1 - x[:-1]) ** 2 + 100 * (x[1:] - x[:-1] ** 2) ** 2).sum()


def network() -> nn.Module:
    """A small smooth model with two layers, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def noisy() -> nn.Module:
    """A model with dropout and batch-norm."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 1)).double()


def fit(model: nn.Module) -> Callable[[], Tensor]:
    return lambda: (model(X) - Y).square().mean()


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def params(model: nn.Module) -> Tensor:
    return flat(list(model.parameters()))


def drawn(family: Family, leaves: Sequence[Tensor], seed: int = 0, step: int = 0, sample: int = 0) -> Tensor:
    """The directions of a step as a matrix (K, D)."""
    rows = family.draw(Plane(seed, step, sample, leaves, list))
    parts = [rows.rows(i, t.detach(), 0, rows.k).reshape(rows.k, -1) for i, t in enumerate(leaves)]
    return torch.cat(parts, 1)


def derivatives(closure: Callable[[], Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Gradient (D,) and Hessian (D, D) by double backward."""
    grads = torch.autograd.grad(closure(), leaves, create_graph=True)
    gradient = torch.cat([g.reshape(-1) for g in grads])
    rows = [torch.autograd.grad(entry, leaves, retain_graph=True, allow_unused=True) for entry in gradient]
    hessian = [
        torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in zip(r, leaves, strict=True)])
        for r in rows
    ]
    return gradient.detach(), torch.stack(hessian).detach()


METHODS = {"fgd": FGD, "fomoh": FoMoH, "fomoh-bp": FoMoHBP, "fomoh-kd": FoMoHKD, "newton": Newton}

P = torch.ones(3, dtype=F64, requires_grad=True)

Q = torch.ones(2, dtype=F64, requires_grad=True)


def another_device() -> Tensor:
    return torch.empty(2, dtype=F64, device="meta", requires_grad=True)


def backward() -> Tensor:
    loss = P.square().sum()
    loss.backward()
    return loss
