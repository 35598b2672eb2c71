"""A LightningModule as it is, with forward passes alone: another optimizer, and ``strategy=ForwardStrategy()``."""

from __future__ import annotations

import argparse
import warnings

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import jetplane as jp
from jetplane.integrations.lightning import ForwardStrategy


class Circle(lightning.LightningModule):
    """Inside or outside of a circle."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return jp.optim.HorizonAdam(self.parameters())  # the swap


def main(argv: list[str] | None = None) -> None:
    """Fit, and look at what was logged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    epochs = parser.parse_args(argv).epochs

    torch.manual_seed(0)
    x = torch.randn(1024, 2)
    data = TensorDataset(x, (x.square().sum(1) > 1.4).long())
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(strategy=ForwardStrategy(), max_epochs=epochs, accelerator="cpu", **quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning would like workers for these data
        trainer.fit(Circle(), DataLoader(data, 128, shuffle=True), DataLoader(data, 512))
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    print(f"{trainer.global_step} steps: loss {found['loss']:.3f}, rate {found['jetplane/rate']:.4f}")
    print(f"{found['accuracy']:.1%} of the points on the right side, with the averaged parameters")
    assert found["accuracy"] > 0.9


if __name__ == "__main__":
    main()
