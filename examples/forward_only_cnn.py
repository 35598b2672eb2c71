"""A convolutional network trained with forward passes alone, by HorizonAdam: no backward pass, no learning rate.

The images are drawn here: noisy horizontal and vertical bars. ``--digits`` takes the digits of the study's package.
``--out cnn.svg`` draws loss and rate (needs matplotlib).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import jetplane as jp


def bars(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (count, 1, 8, 8) with a bar in a row or in a column, and which of the two."""
    labels = torch.randint(2, (count,), generator=generator)
    rows = functional.one_hot(torch.randint(8, (count,), generator=generator), 8).float()
    across = rows.unsqueeze(2).expand(-1, -1, 8)
    images = torch.where(labels[:, None, None] == 0, across, across.transpose(1, 2))
    return (images + 0.5 * torch.randn(count, 8, 8, generator=generator)).unsqueeze(1), labels


def main(argv: list[str] | None = None) -> None:
    """Train, and evaluate the averaged parameters on new images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--digits", action="store_true", help="needs jetplane-lab")
    parser.add_argument("--out", type=Path, help="draw loss and rate into this file")
    arguments = parser.parse_args(argv)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    if arguments.digits:
        from jetplane_lab import data

        digits = data.load("digits")
        (images, labels), (new, truth) = ((s.images, s.labels) for s in map(data.scaled, digits))
    else:
        (images, labels), (new, truth) = bars(2000, generator), bars(500, generator)
    side = images.shape[-1]
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(8 * (side // 2) ** 2, int(labels.max()) + 1)),
    )

    def losses(x: Tensor, y: Tensor) -> Tensor:  # one for each sample: the noise of a batch averages out
        return functional.cross_entropy(model(x), y, reduction="none")

    optimizer, history = jp.optim.HorizonAdam(model.parameters()), []
    with jp.forward_only():  # a backward pass, or an autograd graph, would raise
        for step in range(arguments.steps):
            chosen = torch.randint(len(images), (100,), generator=generator)
            loss = optimizer.step(losses, images[chosen], labels[chosen])
            history.append((float(loss), float(optimizer.report.rate)))
            if step % 20 == 0:
                print(f"step {step:3}: loss {float(loss):.3f}")
    with optimizer.averaged(), torch.no_grad():
        accuracy = float((model(new).argmax(1) == truth).double().mean())
    print(f"{accuracy:.1%} of new images after {arguments.steps} steps without a backward pass")
    assert accuracy > (0.5 if arguments.digits else 0.9)
    if arguments.out is not None:
        draw(arguments.out, history)


def draw(path: Path, history: list[tuple[float, float]]) -> None:
    """The loss before each step, and the rate that the optimizer found."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    named = zip(both, zip(*history, strict=True), ("loss of the batch, in nats", "rate found"), strict=True)
    for axes, values, label in named:
        axes.semilogy(values, color="#1b6ca8")
        axes.set(xlabel="step", ylabel=label)
    figure.savefig(path)
    print(f"drawn: {path}")


if __name__ == "__main__":
    main()
