"""Whole optimizer steps on resident data: eager, and compiled through `opt.steps`.

    python benchmarks/steps.py --device cuda --out benchmarks/results/steps_h200.json

Each method takes the same first steps eagerly and compiled, and the largest difference of their parameters is noted,
beside the farthest that one has moved (a plane that is nearly singular makes a long step of any rounding); then the
compiled steps are timed, many to a call, and the median of the calls is kept. On CUDA it is counted how often the host
waits for the device in such a call.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from jetplane.optim import FGD, FoMoH, FoMoHBP, FoMoHKD, HyperplaneSearch
from jetplane_lab import models

Make = Callable[..., HyperplaneSearch]
ROWS: list[tuple[str, str, Make, int]] = [
    ("FoMoH-3D", "cnn", partial(FoMoHKD, lr=0.05, k=3), 2048),
    ("FoMoH-2D", "cnn", partial(FoMoHKD, lr=0.05, k=2), 2048),
    ("FoMoH", "cnn", partial(FoMoH, lr=0.5), 2048),
    ("FGD", "cnn", partial(FGD, lr=1e-4), 2048),
    ("FoMoH-BP", "cnn", partial(FoMoHBP, lr=0.05), 2048),
    ("FoMoH-3D", "cnn", partial(FoMoHKD, lr=0.05, k=3), 512),
    ("FoMoH-2D", "logistic-regression", partial(FoMoHKD, lr=0.05, k=2), 512),
]


def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[Tensor], Any]:
    """The loss of a batch that is given by its indices, and the number of hits."""

    def loss_fn(index: Tensor) -> Any:
        x, y = images[index], labels[index]
        logits = model(x)
        return F.cross_entropy(logits, y), (logits.argmax(1) == y).sum()

    return loss_fn


def measure(name: str, kind: str, make: Make, batch: int, device: torch.device, steps: int) -> dict[str, Any]:
    """One row."""
    images = torch.randn(8 * batch, 1, 28, 28, generator=torch.Generator().manual_seed(0)).to(device)
    labels = torch.randint(10, (8 * batch,), generator=torch.Generator().manual_seed(1)).to(device)
    order = torch.stack([torch.randperm(8 * batch, device=device)[:batch] for _ in range(steps)])
    plain = models.build(kind, 0).to(device)
    first, model = copy.deepcopy(plain), copy.deepcopy(plain)
    eager = make(plain.parameters(), patience=None)
    compiled = make(model.parameters(), patience=None, compile=True)
    eager.steps(loss_of(plain, images, labels), order[:2], has_aux=True)
    start = time.perf_counter()
    step = loss_of(model, images, labels)
    compiled.steps(step, order[:2], has_aux=True)
    seconds = time.perf_counter() - start
    apart, moved = _distance(plain, model), _distance(plain, first)
    by_hand = _times(lambda: eager.step(loss_of(plain, images, labels), order[0], has_aux=True), 5, 1, device)
    many = _times(lambda: compiled.steps(step, order, has_aux=True), 6, steps, device)
    waits = _waits(lambda: compiled.steps(step, order, has_aux=True), device)
    return {
        "row": name,
        "model": kind,
        "batch": batch,
        "eager_ms": round(by_hand, 4),
        "compiled_ms": round(many, 4),
        "host_waits_per_step": None if waits is None else waits / steps,
        "compile_s": round(seconds, 1),
        "parameters_apart": apart,
        "parameters_moved": moved,
    }


def _distance(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between two parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def _times(call: Callable[[], Any], repeats: int, steps: int, device: torch.device) -> float:
    """The median milliseconds of a step; the first call warms up."""
    found = []
    for repeat in range(repeats):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        if repeat:
            found.append(1e3 * (time.perf_counter() - start) / steps)
    return statistics.median(found)


def _waits(call: Callable[[], Any], device: torch.device) -> int | None:
    """How often torch makes the host wait for the device in a call; None where that cannot be told."""
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in caught)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure every row, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=60, help="to a call")
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(len(ROWS))), metavar="N")
    parser.add_argument("--tf32", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    torch.backends.cudnn.allow_tf32 = options.tf32
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine() + " CPU"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    environment = {"torch": torch.__version__, "jetplane": jp.__version__, "commit": commit, "device": name}
    rows = []
    for number in options.rows:
        rows.append(measure(*ROWS[number], device, options.steps))
        print(rows[-1], flush=True)
        if options.out:  # after each row: a run that is cut short has the rows before
            _write(options.out, {"environment": environment | {"tf32": options.tf32}, "results": rows})


def _write(path: Path, result: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(result, file, indent=1)
    os.replace(file.name, path)


if __name__ == "__main__":
    main()
