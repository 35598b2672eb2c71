"""A run that is saved, and continued in a new process, is the run that was never interrupted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from jetplane.optim import FGD, Acceptance, FoMoH, FoMoHBP, FoMoHKD, HyperplaneSearch, Newton
from jetplane.solvers import Cubic, Damped, SaddleFree, TrustRegion

METHODS: dict[str, Callable[[Iterable[Tensor]], HyperplaneSearch]] = {
    "fgd": lambda p: FGD(p, lr=1e-3, k=2, seed=1),
    "fomoh": lambda p: FoMoH(p, lr=0.5, seed=2, weight_decay=1e-3),
    "fomoh-bp": lambda p: FoMoHBP(p, lr=0.5, clip=1.0),
    "fomoh-kd": lambda p: FoMoHKD(p, k=3, seed=2**63 + 5, solver=SaddleFree(), samples=2),
    "trust-region": lambda p: FoMoHKD(p, k=2, solver=TrustRegion(0.1), accept=Acceptance(backtracks=1), patience=None),
    "cubic": lambda p: FoMoHKD(p, k=2, solver=Cubic(), patience=None, chunk_size=1),
    "newton": lambda p: Newton(p, lr=0.1, solver=Damped(1.0), patience=None),
}


class Run:
    """A small network with batch-norm and dropout in training, with a scheduler."""

    def __init__(self, method: str) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Dropout(0.2), nn.Linear(3, 1))
        self.x, self.y = torch.randn(16, 2), torch.randn(16, 1)
        self.opt = METHODS[method](self.model.parameters())
        self.scheduler = CosineAnnealingLR(self.opt, 60)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.opt.step(lambda: (self.model(self.x) - self.y).square().mean())
            self.scheduler.step()

    def state(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "opt", "scheduler")}
        return {**parts, "random": torch.get_rng_state()}

    def load(self, state: dict[str, Any]) -> None:
        for name in ("model", "opt", "scheduler"):
            getattr(self, name).load_state_dict(state[name])
        torch.set_rng_state(state["random"])


def continued(folder: Path, steps: int) -> None:
    """What the new process does."""
    for method in METHODS:
        run = Run(method)
        run.load(torch.load(folder / f"{method}.pt", weights_only=True))
        run.train(steps)
        torch.save(run.state(), folder / f"{method}-continued.pt")


@pytest.mark.parametrize(("before", "after"), [(3, 5), pytest.param(20, 30, marks=pytest.mark.slow)])
def test_steps_go_on_in_a_new_process(before: int, after: int, tmp_path: Path) -> None:
    whole = {}
    for method in METHODS:
        run = Run(method)
        start = run.model[0].weight.detach().clone()
        run.train(before)
        torch.save(run.state(), tmp_path / f"{method}.pt")
        run.train(after)
        assert not torch.equal(run.model[0].weight, start)
        whole[method] = run.state()
    subprocess.run([sys.executable, __file__, str(tmp_path), str(after)], check=True, timeout=300)
    for method, expected in whole.items():
        found = torch.load(tmp_path / f"{method}-continued.pt", weights_only=True)
        assert found["opt"] == expected["opt"], method
        assert found["opt"]["param_groups"][0]["step"] == before + after
        assert torch.equal(found["random"], expected["random"]), method
        for name, value in expected["model"].items():
            assert torch.equal(found["model"][name], value), (method, name)


if __name__ == "__main__":
    continued(Path(sys.argv[1]), int(sys.argv[2]))
