"""Trainers under torchrun: the processes take each step together, and that of the whole batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import jetplane as jp
import trainer_jobs
from jetplane.integrations import micro_batches
from many_processes import torchrun

JOBS = Path(trainer_jobs.__file__)


def run(package: str, kind: str, folder: Path) -> list[torch.Tensor]:
    """The parameters of both processes."""
    pytest.importorskip(package, reason=f"{package} is not installed")
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(
        [*torchrun(2), str(JOBS), package, kind, str(folder)],
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plane", "horizon", "adamw"])
@pytest.mark.parametrize("package", ["accelerate", "transformers", "lightning"])
def test_processes_stay_together(package: str, kind: str, tmp_path: Path) -> None:
    one, other = run(package, kind, tmp_path)
    assert torch.equal(one, other) and bool(one.isfinite().all())


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one_with_the_whole_batch(tmp_path: Path) -> None:
    found, _ = run("accelerate", "plane", tmp_path)
    model = trainer_jobs.small()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = trainer_jobs.optimizer_of("plane", model.parameters())
    for x, y in DataLoader(trainer_jobs.DATA, 8):
        optimizer.step(lambda x=x, y=y: functional.cross_entropy(model(x), y))
    alone = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert float((alone - before).norm()) > 0.1
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


class Group:
    """As large as two processes."""

    def size(self) -> int:
        return 2


def test_an_optimizer_that_does_not_know_of_the_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trainer_jobs.small()
    optimizers: list[Any] = [jp.optim.FoMoH(model.parameters()), jp.optim.MeZO(model.parameters())]
    estimate = jp.ForwardGradient(model.parameters())
    world = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, group=SimpleNamespace(WORLD=Group())
    )
    monkeypatch.setattr(micro_batches, "distributed", world)
    for optimizer in optimizers:
        name = type(optimizer).__name__
        with pytest.raises(ValueError, match=f"there are 2 processes, and {name} has no process_group; expected"):
            micro_batches.MicroBatches(optimizer)
    with pytest.raises(ValueError, match="2 processes, and the estimate has no process_group"):
        micro_batches.MicroBatches(torch.optim.SGD(model.parameters()), estimate)
