"""A contest: which runs there are, rates chosen by the validation split, and what is there already is not run again."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..config import choice
from .contest_run import Data, Entry, Settings, passes_of, run
from .contestants import CONTESTANTS, MOVING
from .encoder import pretrained
from .reviews import reviews, split_by_hash
from .tokens import encode
from .turns_on_device import Turns

__all__ = ["QUICK", "hold", "load", "quick"]

QUICK = {"length": 32, "batch": 16, "epochs": 1, "layers": 2, "texts": 160}
SEEDS = (0, 1, 2)


def quick(settings: Settings) -> Settings:
    """The same with two layers and few short texts: a look on a laptop."""
    return Settings(**{**vars(settings), **QUICK})


def load(settings: Settings, data_dir: str | os.PathLike[str] | None = None) -> Data:
    """MiniLM and the splits, on the device."""
    start = pretrained(data_dir)
    splits = split_by_hash(reviews(settings.source, data_dir))
    texts = (encode(start.vocabulary, split[: settings.texts], settings.length).to(settings.device) for split in splits)
    return Data(start, *texts)


def hold(
    methods: Sequence[str],
    kinds: Sequence[str],
    seeds: Sequence[int],
    settings: Settings,
    data: Data,
    folder: Path,
    say: Callable[[str], None],
    turns: Turns,
) -> list[dict[str, Any]]:
    """The tested records of these methods, for each seed; runs that the folder has are not run again."""
    for what, values, allowed in (("method", methods, CONTESTANTS), ("moving", kinds, MOVING)):
        for value in values:
            choice(what, value, allowed)
    records = []
    for kind in kinds:
        budget: float | None = None
        for method in methods:
            if budget is None and CONTESTANTS[method].by_passes:
                budget = _budget(kind, settings, data)
            rate = _rate(method, kind, seeds[0], settings, data, budget or 0.0, folder, say, turns)
            for seed in seeds:
                entry = Entry(method, kind, rate, seed, True, settings)
                records.append(run(entry, data, budget or 0.0, folder, say, turns))
    return records


def _budget(kind: str, settings: Settings, data: Data) -> float:
    """The forward passes of a batch that HorizonAdam's run has."""
    entry = Entry("horizon", kind, 1.0, 0, True, settings)
    return passes_of(entry, data) * (len(data.train) // settings.batch * settings.epochs)


def _rate(
    method: str,
    kind: str,
    seed: int,
    settings: Settings,
    data: Data,
    budget: float,
    folder: Path,
    say: Callable[[str], None],
    turns: Turns,
) -> float:
    """The only rate, or the one with the best validation accuracy at the end, and the least loss among equals."""
    tried = CONTESTANTS[method].rates_of or method
    rates = CONTESTANTS[tried].rates[kind]
    if len(rates) == 1:
        return rates[0]
    found = [run(Entry(tried, kind, rate, seed, False, settings), data, budget, folder, say, turns) for rate in rates]
    best = max(found, key=lambda record: (record["validation"], -_loss(record)))
    say(f"{kind}-{tried}: {best['entry']['rate']:g} is the best rate of {', '.join(f'{rate:g}' for rate in rates)}")
    return float(best["entry"]["rate"])


def _loss(record: dict[str, Any]) -> float:
    """A loss that was not finite is written as -1."""
    loss = float(record["validation_loss"])
    return loss if loss >= 0 else float("inf")
