"""HorizonAdam as shipped beside backprop with Adam, on small tasks that it was not made for.

    python benchmarks/tasks.py --out benchmarks/results/tasks_cpu.json

Backprop has a cosine schedule and the best one of several learning rates, chosen on the very scores that are shown: a
rival that is flattered. HorizonAdam has no learning rate and no schedule, runs once with its defaults, under
`jetplane.forward_only()`, and is evaluated at its averaged parameters. The rate of backprop is chosen with the first
seed. On CUDA the steps of HorizonAdam are compiled, and replayed as graphs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import jetplane as jp
from jetplane.optim import HorizonAdam
from jetplane_lab import data

RATES = (1e-3, 3e-3, 1e-2, 3e-2)  # of backprop
_CHUNK = 100  # steps whose batches are gathered at once


class Task(NamedTuple):
    """A model, its data, and what is counted."""

    model: Callable[[], nn.Module]
    samples: Callable[[int], tuple[Tensor, Tensor]]  # 0: for training, 1: for the score
    losses: Callable[[Tensor, Tensor], Tensor]  # (B,)
    score: Callable[[Tensor, Tensor], Tensor]
    unit: str
    batch: int
    steps: int


def spirals(split: int) -> tuple[Tensor, Tensor]:
    """Three arms in the plane."""
    generator = torch.Generator().manual_seed(split)
    count = (6000, 1500)[split]
    arm, t = torch.randint(3, (count,), generator=generator), torch.rand(count, generator=generator) * 4 + 0.3
    angle = 1.5 * t + arm * 2 * math.pi / 3
    x = torch.stack([t * angle.cos(), t * angle.sin()], 1) / 2
    return x + 0.05 * torch.randn(count, 2, generator=generator), arm


def table(split: int) -> tuple[Tensor, Tensor]:
    """Twelve columns, of which eight matter, with noise of variance 0.04."""
    generator = torch.Generator().manual_seed(split)
    x = torch.randn((6000, 1500)[split], 12, generator=generator)
    y = x[:, 0] * x[:, 1] + 2 * x[:, 2].sin() + x[:, 3].abs() + 0.3 * x[:, 4:8].sum(1)
    return x, (y + 0.2 * torch.randn(len(x), generator=generator))[:, None]


def copies(split: int, length: int = 16, words: int = 12) -> tuple[Tensor, Tensor]:
    """Random words, then the same again: the second half can be known."""
    generator = torch.Generator().manual_seed(split)
    x = torch.randint(words, ((4000, 1000)[split], length + 1), generator=generator)
    x[:, length // 2 :] = x[:, : length + 1 - length // 2].clone()
    return x[:, :-1], x[:, 1:]


def digits(split: int) -> tuple[Tensor, Tensor]:
    """The embedded subset of MNIST."""
    whole = data.load("digits")
    part = whole.train if split == 0 else whole.test
    return part.images.float().reshape(-1, 1, 28, 28) / 255, part.labels.long()


def coloured(split: int) -> tuple[Tensor, Tensor]:
    """The digits in a colour on a background of another, larger, with noise."""
    shapes, labels = digits(split)
    generator = torch.Generator().manual_seed(split)
    shapes = F.interpolate(shapes, size=32, mode="bilinear")
    ink, paper = (torch.rand(len(labels), 3, 1, 1, generator=generator) for _ in range(2))
    noise = torch.randn(len(labels), 3, 32, 32, generator=generator)
    return (shapes * ink + (1 - shapes) * paper / 2 + 0.1 * noise - 0.4) / 0.3, labels


def convolutions() -> nn.Module:
    """Three layers of small windows, each pooled, and a hidden layer."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


def _blocks(width: int) -> nn.ModuleList:
    """Two layers of a transformer."""
    layer: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    return nn.ModuleList([nn.TransformerEncoderLayer(width, 4, 2 * width, **layer) for _ in range(2)])


class Patches(nn.Module):
    """A small transformer that reads an image as 16 patches, and takes their mean or a token of its own."""

    def __init__(self, width: int = 32, token: bool = False) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(49, width), nn.Parameter(0.02 * torch.randn(16 + token, width))
        self.token = nn.Parameter(torch.zeros(1, 1, width)) if token else None
        self.layers, self.norm = _blocks(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.embed(F.unfold(x, 7, stride=7).transpose(1, 2))
        if self.token is not None:
            h = torch.cat([self.token.expand(len(x), 1, -1), h], 1)
        h = h + self.place
        for layer in self.layers:
            h = layer(h)
        h = self.norm(h)
        logits: Tensor = self.head(h.mean(1) if self.token is None else h[:, 0])
        return logits


class Residual(nn.Module):
    """A small residual network with group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.norm = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1), nn.GroupNorm(2, 8)
        self.down, self.head = nn.Conv2d(8, 16, 3, 2, 1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = F.relu(self.stem(x))
        x = x + F.relu(self.norm(self.branch(x)))
        logits: Tensor = self.head(F.relu(self.down(x)).mean((2, 3)))
        return logits


def normed() -> nn.Module:
    """Convolutions and a hidden layer with batch norm."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)),
    )


class Rows(nn.Module):
    """A recurrent network that reads an image row by row."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(28, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.cells(x[:, 0])[0][:, -1])
        return logits


class Transformer(nn.Module):
    """Two layers: causal, with logits of each next word, or bidirectional, with logits of the mean over the places."""

    def __init__(self, words: int, length: int, classes: int, causal: bool, width: int = 32) -> None:
        super().__init__()
        self.causal = causal
        self.words, self.place = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.layers, self.norm = _blocks(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.words(x) + self.place
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device) if self.causal else None
        for layer in self.layers:
            h = layer(h, src_mask=mask, is_causal=self.causal)
        h = self.norm(h)
        logits: Tensor = self.head(h if self.causal else h.mean(1))
        return logits


def counts(split: int, length: int = 12, words: int = 8) -> tuple[Tensor, Tensor]:
    """How often a sequence has the first word: 0 to 3, or more."""
    generator = torch.Generator().manual_seed(split)
    x = torch.randint(words, ((4000, 1000)[split], length), generator=generator)
    return x, (x == 0).sum(1).clamp_max(4)


def echoes(split: int, length: int = 12, words: int = 8, later: int = 3) -> tuple[Tensor, Tensor]:
    """The word of three places ago; the first word, where there was none."""
    generator = torch.Generator().manual_seed(split)
    x = torch.randint(words, ((4000, 1000)[split], length), generator=generator)
    return x, torch.cat([torch.zeros_like(x[:, :later]), x[:, :-later]], 1)


_CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # others are left out


def source(split: int, length: int = 32) -> tuple[Tensor, Tensor]:
    """The characters of this package, in windows: a tenth of its modules is for the score."""
    files = enumerate(sorted(Path(jp.__file__).parent.rglob("*.py")))
    text = "".join(file.read_text() for place, file in files if (place % 10 == 0) == bool(split))
    numbers = torch.tensor([_CHARACTERS.index(one) for one in text if one in _CHARACTERS])
    windows = numbers[: (len(numbers) - 1) // length * length].reshape(-1, length)
    return windows, numbers[1 : windows.numel() + 1].reshape(-1, length)


class Recurrent(nn.Module):
    """An LSTM."""

    def __init__(self, words: int = 8) -> None:
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(words, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of each place."""
        logits: Tensor = self.head(self.cell(self.words(x))[0])
        return logits


def _token_nll(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)


def _nll(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


def _hits(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.argmax(1) == y).float().mean()


def _perceptron(*sizes: int, norm: bool = False, act: type[nn.Module] = nn.ReLU) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(sizes[:-1]):
            layers += [nn.Linear(fan_in, fan_out), *([nn.LayerNorm(fan_out)] if norm else []), act()]
        return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))

    return build


TASKS = {
    "spirals, perceptron": Task(_perceptron(2, 64, 64, 3), spirals, _nll, _hits, "accuracy", 256, 2000),
    "table, perceptron with layer norm": Task(
        _perceptron(12, 64, 64, 1, norm=True, act=nn.GELU),
        table,
        lambda out, y: F.mse_loss(out, y, reduction="none").mean(1),
        lambda out, y: F.mse_loss(out, y),
        "mean squared error",
        256,
        2000,
    ),
    "digits, residual network": Task(Residual, digits, _nll, _hits, "accuracy", 256, 1000),
    "digits, batch norm": Task(normed, digits, _nll, _hits, "accuracy", 128, 400),
    "coloured digits, convolutions": Task(convolutions, coloured, _nll, _hits, "accuracy", 128, 400),
    "digits by patches, transformer": Task(Patches, digits, _nll, _hits, "accuracy", 128, 600),
    "digits by patches, class token": Task(partial(Patches, token=True), digits, _nll, _hits, "accuracy", 128, 600),
    "digits by rows, GRU": Task(Rows, digits, _nll, _hits, "accuracy", 128, 500),
    "copied words, transformer": Task(
        partial(Transformer, 12, 16, 12, causal=True),
        copies,
        _token_nll,
        lambda out, y: (out.argmax(2) == y)[:, 8:].float().mean(),
        "accuracy of the second half",
        128,
        600,
    ),
    "characters, transformer": Task(
        partial(Transformer, len(_CHARACTERS), 32, len(_CHARACTERS), causal=True, width=48),
        source,
        _token_nll,
        lambda out, y: F.cross_entropy(out.transpose(1, 2), y),
        "cross-entropy error",
        64,
        600,
    ),
    "counted words, bidirectional encoder": Task(
        partial(Transformer, 8, 12, 5, causal=False), counts, _nll, _hits, "accuracy", 128, 600
    ),
    "echoed words, LSTM": Task(
        Recurrent,
        echoes,
        _token_nll,
        lambda out, y: (out.argmax(2) == y)[:, 3:].float().mean(),
        "accuracy from the fourth place on",
        128,
        600,
    ),
}


def train(
    task: Task,
    rate: float | None,
    steps: int,
    seed: int = 0,
    samples: int | None = None,
    device: str = "cpu",
    resample: bool = False,
) -> dict[str, Any]:
    """Train with backprop at ``rate``, or with HorizonAdam and that many tangents of a sample."""
    torch.manual_seed(seed)
    model = task.model().to(device)
    (x, y), held = ([part.to(device) for part in task.samples(split)] for split in (0, 1))
    order = torch.Generator().manual_seed(seed + 1)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return task.losses(model(x), y)

    horizon = HorizonAdam(model.parameters(), samples=samples, seed=seed, resample=resample, compile=x.is_cuda)
    adam = torch.optim.Adam(model.parameters(), 1.0 if rate is None else rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    began = time.perf_counter()
    for start in range(0, steps, _CHUNK):
        count = min(_CHUNK, steps - start)
        batches = torch.stack([torch.randint(len(x), (task.batch,), generator=order) for _ in range(count)])
        if rate is None:
            with jp.forward_only():
                horizon.steps(losses, x[batches], y[batches])
        else:
            for batch in batches:
                adam.zero_grad()
                losses(x[batch], y[batch]).mean().backward()
                adam.step()
                schedule.step()
    rate = rate if rate is not None else float(horizon.report.rate)
    seconds = time.perf_counter() - began
    if not adam.state:
        horizon.eval()
        update_bn(x.split(500), model)  # statistics of the averaged parameters, by forward passes
    model.eval()
    with torch.no_grad():
        out = model(held[0])
        found = {"loss": float(task.losses(out, held[1]).mean()), "score": float(task.score(out, held[1]))}
    return {"rate": rate, **found, "seconds": round(seconds, 1)}


def main() -> None:
    """Run the tasks, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS), metavar="NAME")
    parser.add_argument("--steps", type=int, help="(default: each task's own)")
    parser.add_argument("--samples", type=int, metavar="J", help="tangents, of HorizonAdam (default: its own)")
    parser.add_argument("--resample", action="store_true", help="samples drawn by the slopes of their losses")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], metavar="N", help="(default: 0 1)")
    parser.add_argument("--device", default="cpu", help="(default: cpu)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for name in options.tasks:
        task = TASKS[name]
        steps = options.steps or task.steps
        first, *further = options.seeds
        go = partial(train, task, steps=steps, device=options.device)
        backprop = [go(rate=rate, seed=first) for rate in RATES]
        best = (min if "error" in task.unit else max)(backprop, key=lambda one: one["score"])
        row = {"task": name, "unit": task.unit, "batch": task.batch, "steps": steps, "seeds": options.seeds}
        row["samples"] = options.samples  # None: HorizonAdam's own
        row["resample"] = options.resample
        own = {"samples": options.samples, "resample": options.resample}
        row["horizon"] = [go(rate=None, seed=seed, **own) for seed in options.seeds]
        row["backprop"] = [best, *(go(rate=best["rate"], seed=seed) for seed in further)]
        results.append(row | {"backprop, every rate": backprop})
        print(name, {key: results[-1][key] for key in ("horizon", "backprop")}, flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    environment = {"torch": torch.__version__, "jetplane": jp.__version__, "commit": commit}
    name = torch.cuda.get_device_name() if "cuda" in options.device else platform.machine() + " CPU"
    environment |= {"device": name, "threads": torch.get_num_threads()}
    if options.out:
        with tempfile.NamedTemporaryFile("w", dir=options.out.parent, delete=False) as file:
            json.dump({"environment": environment, "results": results}, file, indent=1)
        os.replace(file.name, options.out)


if __name__ == "__main__":
    main()
