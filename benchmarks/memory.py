"""Memory, cost and time of one gradient against depth: forward gradients, backprop, and backprop with checkpoints.

    python benchmarks/memory.py --device cuda --out benchmarks/results/memory_h200.json

A residual perceptron of so many layers, width 256, batch 2048. Memory is the peak above the parameters, their ``.grad``
and the batch; what forward gradients have learned is part of it. Checkpoints are one for each root of the depth, with
which they need least. Forward-equivalents are the operations of a gradient over those of a forward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import jetplane as jp
from jetplane_lab import cost
from jetplane_lab.bench.machine import environment
from jetplane_lab.training.memory import Peak

WIDTH, CLASSES = 256, 10


class Deep(nn.Module):
    """x + W2 relu(W1 x) with a norm, again and again: two products to a block."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(layers // 2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)
        self.every = 0  # blocks between two checkpoints; 0: none

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        size = self.every or len(self.blocks)
        for start in range(0, len(self.blocks), size):
            if self.every:
                x = checkpoint(self._part, x, start, start + size, use_reentrant=False)
            else:
                x = self._part(x, start, start + size)
        logits: Tensor = self.head(x)
        return logits

    def _part(self, x: Tensor, start: int, stop: int) -> Tensor:
        for block in self.blocks[start:stop]:
            x = x + block(x)
        return x


def row(layers: int, name: str, batch: int, device: torch.device, samples: int, chunk: int | None) -> dict[str, Any]:
    """One gradient, again and again."""
    torch.manual_seed(0)
    model = Deep(layers).to(device)
    x, y = torch.randn(batch, WIDTH, device=device), torch.arange(batch, device=device) % CLASSES
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model.every = round((layers // 2) ** 0.5) if name == "checkpointed" else 0
    step: Callable[[], object]
    if name == "forward":
        estimate = jp.ForwardGradient(model.parameters(), samples, chunk_size=chunk)

        def step() -> None:
            with jp.forward_only():
                estimate(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x, y)

    else:

        def step() -> None:
            F.cross_entropy(model(x), y).backward()

    peak = Peak(device)
    for _ in range(3):  # the first makes a plan
        step()
    peak.clear()
    times = []
    for _ in range(5):
        _wait(device)
        began = time.perf_counter()
        step()
        _wait(device)
        times.append(time.perf_counter() - began)
    memory = peak.read()
    return {
        "layers": layers,
        "method": name,
        "samples": samples if name == "forward" else None,
        "chunk": chunk if name == "forward" else None,
        "peak_mib": memory / 2**20,
        "forward_equivalents": cost.forward_equivalents(step, model, x),
        "ms": 1e3 * statistics.median(times),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure, print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    found: list[dict[str, Any]] = []
    for name, chunk in (("forward", None), ("forward", 4), ("forward", 1), ("backprop", None), ("checkpointed", None)):
        for layers in options.layers:
            found.append(row(layers, name, options.batch, device, options.samples, chunk))
            print({key: round(value, 2) if isinstance(value, float) else value for key, value in found[-1].items()})
    if options.out:
        result = {"environment": environment(device.type, torch.get_num_threads()), "results": found}
        with tempfile.NamedTemporaryFile("w", dir=options.out.parent, delete=False) as file:
            json.dump(result, file, indent=1)
        os.replace(file.name, options.out)


if __name__ == "__main__":
    main()
