"""Keep the recipe and swap the gradient: ``jp.ForwardGradient`` in place of ``loss.backward()``, with AdamW."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.nn import functional

import jetplane as jp


def main(argv: list[str] | None = None) -> None:
    """Train, and look at how good the estimate is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--samples", type=int, default=8, help="random tangents of each activation")
    arguments = parser.parse_args(argv)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.GELU(), torch.nn.Linear(32, 3))
    params = list(model.parameters())

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), y, reduction="none")

    optimizer = torch.optim.AdamW(params, lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    estimate = jp.ForwardGradient(params, samples=arguments.samples)
    first = last = 0.0
    for step in range(arguments.steps):
        x = torch.randn(128, 4)
        y = x[:, :3].argmax(1)
        optimizer.zero_grad()
        loss = estimate(losses, x, y).mean()  # adds to .grad; two forward passes, no backward pass
        if step in (0, arguments.steps - 1):
            cosine = compare(params, losses(x, y).mean())
            print(f"step {step:3}: loss {float(loss):.3f}, cosine with the exact gradient {cosine:.2f}")
            assert cosine > 0.1
        optimizer.step()
        schedule.step()
        first, last = (float(loss) if step == 0 else first), float(loss)
    assert last < 0.6 * first


def compare(params: list[Tensor], loss: Tensor) -> float:
    """The cosine between ``.grad`` and what backprop finds."""
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)])
    return float(functional.cosine_similarity(exact, torch.cat([p.grad.flatten() for p in params]), dim=0))


if __name__ == "__main__":
    main()
