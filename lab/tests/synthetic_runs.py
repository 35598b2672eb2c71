"""Run folders with invented numbers, written with the classes that a real run uses."""

from __future__ import annotations

import json
import random
from pathlib import Path

from jetplane_lab.training import Config, Metrics, Summary


def write_run(
    folder: Path,
    config: Config,
    *,
    speed: float = 1.0,
    nll: float = 0.3,
    accuracy: float = 0.92,
    rise: float = 0.0,
    epochs: int | None = None,
    reason: str | None = "finished",
    device: str = "NVIDIA H200",
) -> Path:
    """A run that falls to ``nll`` and ``accuracy``, then rises by the share ``rise``; ``reason`` None: it goes on."""
    noise = random.Random(f"{config.seed} {config.method} {config.k}")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.to_json())
    environment = {"jetplane": "0.1.0", "torch": "2.13.0", "device": device, "command": "jetplane train --out /secret"}
    (folder / "environment.json").write_text(json.dumps(environment))
    lines = []
    for epoch in range(1, (epochs or config.epochs) + 1):
        left = (1 + epoch * speed / 8) ** -2
        value = (nll + (2.3 - nll) * left) * (1 + 0.003 * noise.gauss(0, 1)) + rise * nll * epoch / config.epochs
        hits = accuracy - (accuracy - 0.1) * left + 0.0005 * noise.gauss(0, 1)
        lines.append(
            Metrics(
                **{"epoch": epoch, "lr": config.lr, "train_nll": value, "train_accuracy": hits},
                **{"train_nll_after": None, "train_accuracy_after": None},
                **{"validation_nll": 1.01 * value, "validation_accuracy": hits, "slope": 0.1, "curvature": 2.0},
                **{"negative_curvature": 0.2, "step_length": 0.01, "steps": 30, "not_taken": {}},
                **{"forward_equivalents": (1.0 + 2 * config.k) * epoch, "seconds": 0.5 * config.k * epoch},
                **{"evaluation_seconds": 0.1 * epoch, "peak_memory": config.k * 2**20},
            )
        )
    (folder / "metrics.jsonl").write_text("".join(line.to_json() + "\n" for line in lines))
    if reason is not None:
        message = f"{reason} in epoch {len(lines)}: invented."
        end = Summary(reason, message, len(lines), lines[-1], None, None, 7850, 3.0, 1.0, 1.0, 1, "cuda allocated")
        (folder / "summary.json").write_text(end.to_json())
    return folder
