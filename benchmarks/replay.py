"""The replay of a run from its journal beside the training of it: bit by bit the same, and how much faster.

    python benchmarks/replay.py --steps 10000 --device cuda --out benchmarks/results/replay_h200.json

Each row trains the paper's CNN on random images with a journal, each step on a batch of its own, and then rebuilds the
last parameters from the first snapshot and the records. The bits of both, and all checksums on the way, are compared
before a time is kept. One process for each row. Training is timed with its journal, by the medians of steps without and
of all with one beside the total; what the journal takes on the disk is counted. Seconds of the processor, of all
threads, stand beside those of the clock: on a CPU they say the same when other programs run, too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from jetplane import journal
from jetplane.optim import FGD, FoMoH, FoMoHKD, GaussNewtonSearch, HyperplaneSearch
from jetplane.solvers import SaddleFree
from jetplane_lab import models
from jetplane_lab.bench.machine import environment

ROWS: dict[str, Callable[..., HyperplaneSearch]] = {
    "FGD": partial(FGD, lr=1e-4),
    "FoMoH": partial(FoMoH, lr=0.05),
    "FoMoH-3D": partial(FoMoHKD, lr=0.01, k=3, solver=SaddleFree()),
    "Gauss-Newton, K = 64": partial(GaussNewtonSearch, k=64),
}
_IMAGES = 8192
_PLAIN = 20  # steps without a journal, after some that warm up


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.tf32
    device = torch.device(options.device)
    images = torch.randn(_IMAGES, 1, 28, 28, generator=torch.Generator().manual_seed(0)).to(device)
    labels = torch.randint(10, (_IMAGES,), generator=torch.Generator().manual_seed(1)).to(device)
    model = models.build("cnn", 0).to(device)
    optimizer = ROWS[name](model.parameters(), patience=None)
    reduction = "none" if isinstance(optimizer, GaussNewtonSearch) else "mean"

    def step(number: int) -> float:
        made = torch.Generator().manual_seed(number)
        index = torch.randint(_IMAGES, (options.batch,), generator=made).to(device)
        _wait(device)
        start = time.perf_counter()
        optimizer.step(lambda: F.cross_entropy(model(images[index]), labels[index], reduction=reduction))
        _wait(device)
        return time.perf_counter() - start

    plain = statistics.median([step(number) for number in range(2 * _PLAIN)][_PLAIN:])
    with tempfile.TemporaryDirectory() as folder:
        settings = {"snapshot_every": 2 * options.steps + 1000, "commit_every": options.commit_every}
        with journal.Journal(folder, optimizer, model=model, **settings):
            began = time.process_time()
            times = [step(2 * _PLAIN + number) for number in range(options.steps)]
            busy = time.process_time() - began
        start, began = time.perf_counter(), time.process_time()
        found = journal.replay(folder)
        _wait(device)
        replayed, busy_replaying = time.perf_counter() - start, time.process_time() - began
        for leaf, value in model.named_parameters():
            if not torch.equal(found[leaf], value):
                raise RuntimeError(f"the replay has another {leaf} than training; expected the same bits.")
        recorded = journal.opened(folder)
        taken = sum(record.status.name == "OK" for record in recorded.records(recorded.first, recorded.last))
        size = recorded.path.stat().st_size
    return {
        "row": name,
        "batch": options.batch,
        "steps": options.steps,
        "steps_taken": taken,  # the others moved nothing
        "train_s": round(sum(times), 3),
        "replay_s": round(replayed, 3),
        "ratio": round(sum(times) / replayed, 2),
        "train_cpu_s": round(busy, 3),
        "replay_cpu_s": round(busy_replaying, 3),
        "ratio_of_cpu": round(busy / busy_replaying, 2),
        "step_ms": round(1e3 * statistics.median(times), 3),
        "step_without_journal_ms": round(1e3 * plain, 3),
        "journal_bytes": size,
        "parameter_bytes": sum(leaf.numel() * leaf.element_size() for leaf in model.parameters()),
        "bits": "equal",
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure every row, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--commit-every", type=int, default=1, help="steps (default: %(default)s)")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--tf32", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {"environment": environment(options.device, options.threads) | {"tf32": options.tf32}, "results": []}
    for name in options.rows:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found["results"].append(pool.apply(measure, (name, options)))
        print(found["results"][-1], flush=True)
        if options.out:  # after each row: a run that is cut short has the rows before
            _write(options.out, found)


def _write(path: Path, result: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(result, file, indent=1)
    os.replace(file.name, path)


if __name__ == "__main__":
    main()
