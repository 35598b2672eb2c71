"""Runs that keep a journal: small models with batch norm, one for each optimizer that can have one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from jetplane import directions as d
from jetplane.journal import Journal, opened
from jetplane.optim import FGD, Acceptance, FoMoH, FoMoHKD, GaussNewtonSearch, HyperplaneSearch, Newton
from jetplane.solvers import Cubic, Damped, NegativeSlope, SaddleFree

Make = Callable[[nn.Module], HyperplaneSearch]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def convolutional() -> nn.Module:
    """A CNN for images (1, 6, 6)."""
    first = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.GELU(), nn.MaxPool2d(2))
    return nn.Sequential(first, nn.Flatten(), nn.Linear(12, 1))


def _searched(family: Any, **options: Any) -> Make:
    options = {"lr": 0.05, "curvature": "exact", "solver": SaddleFree(), **options}
    return lambda model: HyperplaneSearch(model.parameters(), directions=family, **options)


def _groups(model: nn.Module) -> HyperplaneSearch:
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.02, "weight_decay": 0.1}, {"params": others}]
    return FoMoHKD(groups, lr=0.05, k=2, solver=SaddleFree())


METHODS: dict[str, Make] = {
    "fgd": lambda m: FGD(m.parameters(), lr=1e-2, k=2, seed=1, weight_decay=0.01),
    "fomoh": lambda m: FoMoH(m.named_parameters(), lr=0.1, seed=2**63 + 5),
    "fomoh-kd": lambda m: FoMoHKD(m.parameters(), lr=0.05, k=3, clip=0.1),
    "gaussian": lambda m: FoMoHKD(m.parameters(), lr=0.05, k=3, clip=0.1, solver=SaddleFree()),
    "chunked": lambda m: FoMoHKD(m.parameters(), lr=0.05, k=3, chunk_size=2, solver=SaddleFree()),
    "damped": lambda m: FoMoHKD(m.parameters(), k=2, solver=Damped(1.0), accept=Acceptance(backtracks=2)),
    "cubic": lambda m: FoMoHKD(m.parameters(), k=2, solver=Cubic(), patience=None),
    "newton": lambda m: Newton(m.parameters(), lr=0.1, solver=SaddleFree()),
    "gauss-newton": lambda m: GaussNewtonSearch(m.parameters(), k=8),
    "rademacher": _searched(d.Rademacher(2)),
    "sphere": _searched(d.Sphere(2), maximize=True),
    "orthonormal": _searched(d.Orthonormal(3)),
    "rank-one": _searched(d.RankOne(4), curvature="ggn"),
    "previous": _searched([d.PreviousStep(), d.Gaussian(2)]),
    "best": _searched([d.Best(2), d.Momentum(0.9), d.Rademacher(2)]),
    "samples": lambda m: FGD(m.parameters(), lr=1e-2, k=2, samples=2),
    "grown": _searched(d.Grown(d.Gaussian, start=2, most=8, patience=1.0)),
    "per-layer": _searched(d.PerLayer(d.Gaussian(1))),
    "per-layer-memory": _searched([d.PerLayer(d.PreviousStep()), d.Gaussian(1)], solver=NegativeSlope()),
    "groups": _groups,
}


class Run:
    """A run whose batches are a function of the step; its lr follows the step, too."""

    def __init__(
        self,
        method: str,
        dtype: torch.dtype = torch.float64,
        model: Callable[[], nn.Module] = network,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(7)
        self.model = model().to(device, dtype)
        self.optimizer = METHODS[method](self.model)
        self.shape = (1, 6, 6) if model is convolutional else (2,)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(self) -> None:
        number = self.optimizer.param_groups[0]["step"]
        made = torch.Generator().manual_seed(number)
        x = torch.randn(8, *self.shape, generator=made).to(next(self.model.parameters()))
        y = x.flatten(1).sum(1, keepdim=True).tanh()
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * 0.99**number
        self.optimizer.step(lambda: functional.mse_loss(self.model(x), y))

    def journal(self, folder: Path, **options: Any) -> Journal:
        return Journal(folder, self.optimizer, model=self.model, **options)

    def resumed(self, folder: Path, **options: Any) -> Journal:
        return Journal.resume(folder, self.optimizer, model=self.model, **options)

    def states(self, steps: int) -> list[dict[str, Tensor]]:
        """Take steps; the states after each number of them, from 0."""
        found = [self.state]
        for _ in range(steps):
            self.step()
            found.append(self.state)
        return found

    @property
    def state(self) -> dict[str, Tensor]:
        """A copy of all parameters and buffers."""
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two states have the same names and the same bits."""
    return one.keys() == other.keys() and all(same_bits(tensor, other[name]) for name, tensor in one.items())


def same_bits(one: Tensor, other: Tensor) -> bool:
    """The same shape, dtype and bits: zeros of two signs differ, and NaNs may be equal."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(*(t.detach().contiguous().view(kinds[t.element_size()]) for t in (one, other)))


def recorded(folder: Path, method: str = "fomoh-kd", steps: int = 20, **options: Any) -> list[dict[str, Tensor]]:
    """Write the journal of a run; the states after each number of steps, from 0."""
    run = Run(method)
    states = [run.state]
    with run.journal(folder, **options) as journal:
        for number in range(steps):
            journal.place = {"batch": number}
            run.step()
            states.append(run.state)
    return states


def assert_replayed(folder: Path, states: list[dict[str, Tensor]]) -> None:
    """From the first snapshot on, the replay of a journal has the bits of these states."""
    journal = opened(folder)
    replica = journal.replica(0)
    for step, state in enumerate(states):
        found = replica.exported
        assert same({name: found[name] for name in state}, state), step
        replica.take_all(journal.records(step, step + 1))
    assert journal.last == len(states) - 1
