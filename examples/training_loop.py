"""A plain training loop: FoMoH-KD with a learning-rate schedule, saved in the middle and resumed bit for bit."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch.nn import functional

import jetplane as jp

Parts = tuple[torch.nn.Module, jp.optim.FoMoHKD, torch.optim.lr_scheduler.LRScheduler]


def parts(steps: int) -> Parts:
    """A model, its optimizer and its schedule, as they are at the start."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    # SaddleFree always steps downhill; the paper's solver (the default) may ascend where the plane is indefinite
    optimizer = jp.optim.FoMoHKD(model.parameters(), lr=0.5, k=4, solver=jp.solvers.SaddleFree(), clip=1.0)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def train(these: Parts, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """One step for each batch. The closure returns the loss and never calls backward."""
    model, optimizer, schedule = these
    losses = []
    for x, y in batches:
        losses.append(float(optimizer.step(lambda x=x, y=y: functional.cross_entropy(model(x), y))))
        schedule.step()
    return losses


def main(argv: list[str] | None = None) -> None:
    """Train through, and train with a break: both end at the same parameters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args(argv).steps

    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(64, 2, generator=generator) for _ in range(steps)]
    batches = [(x, (x[:, 0] > x[:, 1]).long()) for x in data]

    through = parts(steps)
    losses = train(through, batches)
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {steps} steps")
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])

    half = steps // 2
    first = parts(steps)
    train(first, batches[:half])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        torch.save([part.state_dict() for part in first], path)
        resumed = parts(steps)
        for part, state in zip(resumed, torch.load(path, weights_only=True), strict=True):
            part.load_state_dict(state)
    train(resumed, batches[half:])
    for a, b in zip(through[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(a, b)  # seed and step are in the state: the same directions are drawn
    print(f"resumed after {half} steps: the same parameters, bit for bit")


if __name__ == "__main__":
    main()
