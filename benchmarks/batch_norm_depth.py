"""Forward gradients through many batch norms in training: how far the estimate is from the gradient, and how it trains.

    python benchmarks/batch_norm_depth.py --out benchmarks/results/batch_norm_depth_cpu.json

Three ways to get the derivative d of the losses by a norm's statistics: "bounded" and "exact" are the two settings of
``batch_norm``, and "oracle" is the unbiased scheme with d from backprop, which is what the others are measured by.

- Errors: n x (Linear(16), BatchNorm1d, ReLU) and a head, and a small residual network of convolutions, at their initial
  values; the length of the estimate's error over that of the gradient, the mean of the calls after the first ones, with
  a fresh batch for each.
- Training: HorizonAdam on the network of 12 layers, the mean loss of the last steps; backprop with Adam beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jetplane as jp
from jetplane.gradients.noise.statistics import Statistics  # no public name: the oracle takes the place of its estimate
from jetplane.optim import HorizonAdam

DEPTHS = (2, 4, 8, 12, 16)
Case = tuple[str, Callable[[int], nn.Module], int, Callable[[int], tuple[Tensor, Tensor]]]
WAYS = ("oracle", "bounded", "exact")
_TANGENTS, _CALLS, _LAST = 4, 12, 30


def perceptron(depth: int) -> nn.Module:
    """Linear, batch norm and ReLU, that many times."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(16, 4))


class Block(nn.Module):
    """Two convolutions with batch norm, around which there is a way."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        return F.relu(x + self.body(x))


def residual(blocks: int) -> nn.Module:
    """A stem and some blocks: 1 + 2 norms for each."""
    stem = (nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    body = [Block(8) for _ in range(blocks)]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def vectors(seed: int) -> tuple[Tensor, Tensor]:
    """128 samples; the class is the largest of four numbers."""
    x = torch.randn(128, 16, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :4].argmax(1)


def images(seed: int) -> tuple[Tensor, Tensor]:
    """128 images of 8 x 8; the class is the quarter that is brighter."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(128, 1, 8, 8, generator=generator), torch.randint(4, (128,), generator=generator)
    quarter = F.one_hot(y, 4).reshape(-1, 1, 2, 2).float()
    return x + F.interpolate(quarter, scale_factor=4), y


class Oracle:
    """The d of each norm, from backprop: the gradients of its bias and weight."""

    def __init__(self, model: nn.Module) -> None:
        self._norms = [one for one in model.modules() if isinstance(one, nn.BatchNorm1d | nn.BatchNorm2d)]
        self._found: list[Tensor] = []

    def look(self) -> None:
        """Backprop was done."""
        self._found = [torch.cat([norm.bias.grad, norm.weight.grad]) for norm in self._norms]

    @contextmanager
    def used(self) -> Iterator[None]:
        """In place of the estimates, inside."""
        kept = Statistics._sums

        def found(own: Any, number: int, site: Any, scalars: Tensor) -> Tensor:
            return self._found[sorted(own._norms).index(number)].to(scalars)

        Statistics._sums = found  # type: ignore[method-assign]
        try:
            yield
        finally:
            Statistics._sums = kept  # type: ignore[method-assign]


def _gradient(model: nn.Module, *batch: Tensor) -> Tensor:
    """By backprop; the running statistics stay as they are."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    model.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    return _flat(model)


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])


def _losses(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: F.cross_entropy(model(x), y, reduction="none")


def _options(way: str) -> dict[str, Any]:
    return {"batch_norm": "bounded" if way == "bounded" else "exact"}


def error(model: nn.Module, batches: Callable[[int], tuple[Tensor, Tensor]], way: str, seed: int) -> float:
    """Of the estimate, relative to the gradient."""
    estimate = jp.ForwardGradient(model.parameters(), _TANGENTS, seed=seed, **_options(way))
    oracle, found = Oracle(model), []
    for call in range(_CALLS):
        batch = batches(1000 * seed + call)
        wanted = _gradient(model, *batch)
        oracle.look()
        model.zero_grad()
        _call(estimate, oracle, way, _losses(model), *batch)
        found.append(float((_flat(model) - wanted).norm() / wanted.norm()))
    return sum(found[_CALLS // 2 :]) / (_CALLS - _CALLS // 2)


def _call(go: Callable[..., Any], oracle: Oracle, way: str, *args: Any) -> Any:
    if way != "oracle":
        return go(*args)
    with oracle.used():
        return go(*args)


def trained(way: str, steps: int, seed: int, depth: int = 12) -> float:
    """The mean loss of the last steps, by HorizonAdam, or by backprop and Adam."""
    torch.manual_seed(seed)
    model = perceptron(depth)
    oracle, losses = Oracle(model), []
    horizon = HorizonAdam(model.parameters(), seed=seed, **_options(way))
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(steps):
        batch = vectors(100_000 * (seed + 1) + step)
        if way == "backprop":
            adam.zero_grad()
            loss = _losses(model)(*batch).mean()
            loss.backward()
            adam.step()
        else:
            if way == "oracle":
                _gradient(model, *batch)
                oracle.look()
            loss = _call(horizon.step, oracle, way, _losses(model), *batch)
        losses.append(float(loss.detach()))
    return sum(losses[-_LAST:]) / len(losses[-_LAST:])


def errors(seeds: list[int]) -> Iterator[dict[str, Any]]:
    """Of all networks and ways."""
    cases: list[Case] = [(f"perceptron of {depth}", perceptron, depth, vectors) for depth in DEPTHS]
    cases += [(f"residual network of {1 + 2 * blocks} norms", residual, blocks, images) for blocks in (2, 4)]
    for name, make, size, batches in cases:
        row: dict[str, Any] = {"network": name}
        for way in WAYS:
            row[way] = []
            for seed in seeds:
                torch.manual_seed(seed)
                row[way].append(round(error(make(size), batches, way, seed), 3))
        row["ratio"] = [round(own / best, 3) for own, best in zip(row["bounded"], row["oracle"], strict=True)]
        yield row


def main() -> None:
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], metavar="N")
    parser.add_argument("--steps", type=int, default=300, help="of training; 0 leaves it out (default: 300)")
    parser.add_argument("--ways", nargs="+", default=["backprop", *WAYS], metavar="WAY", help="of training")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, list[dict[str, Any]]] = {"errors": [], "training": []}
    for row in errors(options.seeds):
        print(row, flush=True)
        results["errors"].append(row)
    for way in options.ways if options.steps else ():
        found = [round(trained(way, options.steps, seed), 3) for seed in options.seeds]
        results["training"].append({"network": "perceptron of 12", "way": way, "steps": options.steps, "loss": found})
        print(results["training"][-1], flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    environment: dict[str, Any] = {"torch": torch.__version__, "jetplane": jp.__version__, "commit": commit}
    environment |= {"device": platform.machine() + " CPU", "threads": torch.get_num_threads()}
    environment |= {"seeds": options.seeds, "tangents": _TANGENTS}
    if options.out:
        with tempfile.NamedTemporaryFile("w", dir=options.out.parent, delete=False) as file:
            json.dump({"environment": environment, **results}, file, indent=1)
        os.replace(file.name, options.out)


if __name__ == "__main__":
    main()
