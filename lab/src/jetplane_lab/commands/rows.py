"""The runs of one row: training them, and whether one is there already."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jetplane_lab.presets import Preset
from jetplane_lab.training import Callback, Config, Summary, Trainer, train_together
from jetplane_lab.training.batches import Resident
from jetplane_lab.training.progress import progress

__all__ = ["fit", "is_finished"]


def fit(
    preset: Preset,
    configs: list[Config],
    folder: Path,
    data: Resident,
    together: bool,
    callbacks: Sequence[Callback] = (),
) -> list[Summary]:
    """Train the runs of a row that are not finished, one after the other or step by step."""

    def trainer(config: Config, position: int = 0) -> Trainer:
        shown = progress(f"{preset.name} seed {config.seed}", position)
        return Trainer(config, data, folder / f"seed-{config.seed}", [shown, *callbacks])

    if together and len(configs) > 1:
        return train_together([trainer(config, position) for position, config in enumerate(configs)])
    summaries: list[Summary] = []
    for config in configs:
        summaries.append(trainer(config).fit())
        if summaries[-1].reason == "interrupted":
            break
    return summaries


def is_finished(folder: Path, config: Config) -> bool:
    """Whether the folder holds this run, finished; a folder that cannot be read is left to the trainer to judge."""
    try:
        summary = Summary.from_json((folder / "summary.json").read_text(encoding="utf-8"))
        found = Config.from_json((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError):
        return False
    return found == config and summary.reason == "finished"
