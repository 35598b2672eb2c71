"""A loop of accelerate: FoMoH-KD, a batch in two parts, bf16, a schedule, and a state that is saved and loaded."""

from __future__ import annotations

import argparse
import tempfile

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import jetplane as jp
from jetplane.integrations.accelerate import ForwardOptimizer


def main(argv: list[str] | None = None) -> None:
    """Train for some epochs, go back to the middle, and end at the same loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args(argv).epochs

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    own = jp.optim.FoMoHKD(model.parameters(), lr=1.0, k=8, solver=jp.solvers.SaddleFree(), clip=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(own, 8 * epochs)
    x = torch.randn(512, 4)
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), 32)
    model, optimizer, loader, schedule = accelerator.prepare(model, ForwardOptimizer(own), loader, schedule)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), y)

    def epoch() -> float:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = optimizer.step(loss_fn, x, y)  # in place of accelerator.backward(loss) and optimizer.step()
                schedule.step()
        return float(loss)

    with tempfile.TemporaryDirectory() as folder:
        losses = []
        for number in range(epochs):
            if number == epochs // 2:
                accelerator.save_state(folder)
            losses.append(epoch())
        accelerator.load_state(folder)
        again = [epoch() for _ in range(epochs - epochs // 2)]
    print("losses:", ", ".join(f"{loss:.3f}" for loss in losses))
    print("from the middle once more:", ", ".join(f"{loss:.3f}" for loss in again))
    assert again == losses[epochs // 2 :] and losses[-1] < 0.8 * losses[0]
    report = optimizer.report
    print(f"last step: predicted decrease {float(report.predicted):.4f}, status {report.status.name}")


if __name__ == "__main__":
    main()
