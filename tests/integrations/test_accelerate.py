"""Steps under accelerate: accumulation, precision, schedulers and checkpoints, with the numbers of a plain loop."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import jetplane as jp

pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from jetplane.integrations.accelerate import ForwardOptimizer

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, X[:, :3].argmax(1))


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def optimizer_of(kind: str, model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    if kind == "plane":
        return jp.optim.FoMoHKD(model.parameters(), lr=0.5, k=3, solver=jp.solvers.SaddleFree(), **options)
    if kind == "horizon":
        return jp.optim.HorizonAdam(model.parameters(), samples=2, **options)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


class Run:
    """A loop as accelerate's users write it."""

    def __init__(self, kind: str, folder: Path, parts: int = 1, clip: float | None = None, **options: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts, **options)
        model, self.folder = small(), folder
        own = optimizer_of(kind, model)
        made = ForwardOptimizer(own, clip=clip)
        schedule = torch.optim.lr_scheduler.LinearLR(own, 1.0, 0.1, 10)
        prepared = self.accelerator.prepare(model, made, DataLoader(DATA, 4), schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        assert self.optimizer is made

    def epoch(self) -> list[float]:
        losses = []
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.optimizer.step(lambda x, y: functional.cross_entropy(self.model(x), y), x, y)
                self.schedule.step()
                self.optimizer.zero_grad()
            losses.append(float(loss))
        return losses

    def parameters(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


@pytest.mark.parametrize("kind", ["plane", "horizon", "adamw"])
def test_a_saved_state_goes_on_with_the_numbers_of_an_undisturbed_run(kind: str, tmp_path: Path) -> None:
    through = Run(kind, tmp_path, parts=2)
    through.epoch()
    through.accelerator.save_state(tmp_path / "state")
    losses = through.epoch()
    end = through.parameters()
    resumed = Run(kind, tmp_path, parts=2)
    resumed.accelerator.load_state(tmp_path / "state")
    assert resumed.epoch() == losses
    assert torch.equal(resumed.parameters(), end)
    assert resumed.schedule.get_last_lr() == through.schedule.get_last_lr()


def test_planes_take_the_steps_of_a_plain_loop_with_the_whole_batch(tmp_path: Path) -> None:
    run = Run("plane", tmp_path, parts=3)
    alone = copy.deepcopy(run.model)
    with jp.forward_only():
        losses = run.epoch()
    optimizer = optimizer_of("plane", alone)
    parts = list(DataLoader(DATA, 4))
    for step in range(2):
        optimizer.param_groups[0]["lr"] = 0.5 * (1 - 0.09 * step)
        three = parts[3 * step : 3 * step + 3]
        loss = optimizer.step([lambda x=x, y=y: functional.cross_entropy(alone(x), y) for x, y in three])
    assert losses[-1] == pytest.approx(float(loss), rel=1e-6)
    torch.testing.assert_close(run.parameters(), torch.cat([p.detach().flatten() for p in alone.parameters()]))
    assert run.optimizer.report.status.name == "OK"


def test_gradients_of_parts_add_up_and_are_clipped(tmp_path: Path) -> None:
    run = Run("adamw", tmp_path, parts=6, clip=1e-3)
    head, seen = run.model[2].weight, []  # behind it is only the loss, so its forward gradient is exact
    exact = torch.autograd.grad(functional.cross_entropy(run.model(X), DATA.tensors[1]), head)[0]
    run.optimizer.optimizer.register_step_pre_hook(
        lambda *_: seen.append((head.grad.clone(), torch.stack([p.grad.norm() for p in run.model.parameters()]).norm()))
    )
    run.epoch()
    ((found, norm),) = seen
    torch.testing.assert_close(found / found.norm(), exact / exact.norm())
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


def test_bf16_reaches_the_loss(tmp_path: Path) -> None:
    run, seen = Run("horizon", tmp_path, mixed_precision="bf16"), []
    run.model[0].register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    run.epoch()
    assert set(seen) == {torch.bfloat16}
    with run.optimizer.averaged():
        assert run.optimizer.optimizer.state_dict()["path"]["evaluating"]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    run = Run("plane", tmp_path)
    with pytest.raises(TypeError, match="step of FoMoHKD got no closure; expected step"):
        run.optimizer.step()
    own = run.optimizer.optimizer
    with pytest.raises(ValueError, match=r"clip is 1\.0; expected it as an argument of FoMoHKD"):
        ForwardOptimizer(own, clip=1.0)
    with pytest.raises(ValueError, match="clip is 0; expected a positive norm"):
        ForwardOptimizer(own, clip=0)
    with pytest.raises(ValueError, match="there is an estimate, and FoMoHKD makes its own steps"):
        ForwardOptimizer(own, jp.ForwardGradient(run.model.parameters()))
    with pytest.raises(ValueError, match="compile is True for HorizonAdam"):
        ForwardOptimizer(optimizer_of("horizon", run.model, compile=True))
