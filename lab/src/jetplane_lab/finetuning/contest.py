"""A contest: which runs there are, rates chosen by the validation split, and what is there already is not run again."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import choice
from .contest_run import run
from .contestants import CONTESTANTS, MOVING
from .encoder import pretrained
from .entry import Data, Entry, Settings
from .reviews import reviews, split_by_hash
from .run_files import Record, Say
from .step_cost import passes_of
from .tokens import encode, require_tokenizers
from .turns_on_device import Turns

__all__ = ["QUICK", "SEEDS", "Contest", "load", "quick"]

QUICK: dict[str, Any] = {"length": 16, "batch": 8, "epochs": 2, "layers": 1, "texts": 96, "timed": 2}
SEEDS = (0, 1, 2)


def quick(settings: Settings) -> Settings:
    """The same with one layer and few short texts: a look on a laptop, in which little is learned."""
    return dataclasses.replace(settings, **QUICK)


def load(settings: Settings, data_dir: str | os.PathLike[str] | None = None) -> Data:
    """MiniLM and the splits, on the device."""
    require_tokenizers()
    start = pretrained(data_dir)
    splits = split_by_hash(reviews(settings.source, data_dir))
    layers, most = start.shape.layers, len(splits.train[: settings.texts])
    for name, least, value, limit in (
        ("epochs", 1, settings.epochs, math.inf),
        ("length", 3, settings.length, start.shape.places),  # a word between two marks; a place for each piece
        ("batch", 1, settings.batch, most),
        ("layers", 1, layers if settings.layers is None else settings.layers, layers),
    ):
        if not least <= value <= limit:
            raise ValueError(f"{name} is {value}; expected a whole number from {least} to {limit}")
    texts = (encode(start.vocabulary, split[: settings.texts], settings.length).to(settings.device) for split in splits)
    return Data(start, *texts)


@dataclasses.dataclass
class Contest:
    """Methods on one model and one set of texts; every run is a record in ``folder``.

    A run that fails is named in ``failures``, and the others go on.
    """

    settings: Settings
    data: Data
    folder: Path
    say: Say
    turns: Turns
    debug: bool = False
    failures: list[str] = dataclasses.field(default_factory=list)
    _passes: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)  # of a step, by method and kind

    def hold(self, methods: Sequence[str], kinds: Sequence[str], seeds: Sequence[int]) -> list[Record]:
        """The tested records of these methods, for each seed; runs that the folder has are not run again."""
        for what, values, allowed in (("method", methods, CONTESTANTS), ("moving", kinds, MOVING)):
            for value in values:
                choice(what, value, allowed)
        found = []
        for kind in kinds:
            budget = self.budget(kind) if any(CONTESTANTS[method].by_passes for method in methods) else 0.0
            for method in methods:
                try:
                    found += self._rows(method, kind, seeds, budget)
                except Exception as error:  # a method that fails must not end the others
                    if self.debug:
                        raise
                    failure = f"{kind}-{method} failed: {' '.join(str(error).split()) or type(error).__name__}"
                    self.say(failure)
                    self.failures.append(failure)
        return found

    def budget(self, kind: str) -> float:
        """The forward passes of a batch that HorizonAdam's run has."""
        entry = Entry("horizon", kind, 1.0, 0, True, self.settings)
        return self._counted(entry, self.data) * (len(self.data.train) // self.settings.batch * self.settings.epochs)

    def _counted(self, entry: Entry, data: Data) -> float:
        """The passes of a step, which are the same for all rates and seeds."""
        key = entry.method, entry.moving
        if key not in self._passes:
            self.say(f"{entry.moving}-{entry.method}: counting the passes of a step")
            self._passes[key] = passes_of(entry, data)
        return self._passes[key]

    def _rows(self, method: str, kind: str, seeds: Sequence[int], budget: float) -> list[Record]:
        rate = self._rate(method, kind, seeds[0], budget)
        return [self._run(Entry(method, kind, rate, seed, True, self.settings), budget) for seed in seeds]

    def _rate(self, method: str, kind: str, seed: int, budget: float) -> float:
        """The only rate, or the one with the best validation accuracy at the end, and the least loss among equals."""
        tried = CONTESTANTS[method].rates_of or method
        rates = CONTESTANTS[tried].rates[kind]
        if len(rates) == 1:
            return rates[0]
        found = [self._run(Entry(tried, kind, rate, seed, False, self.settings), budget) for rate in rates]
        best = max(found, key=lambda record: (record["validation"], -_loss(record)))
        shown = ", ".join(f"{record['entry']['rate']:g}: {record['validation']:.2%}" for record in found)
        rate = float(best["entry"]["rate"])
        end = ", at the end of those that were tried" if rate in (min(rates), max(rates)) else ""
        self.say(f"{kind}-{tried}: {rate:g} is the best rate{end} ({shown})")
        return rate

    def _run(self, entry: Entry, budget: float) -> Record:
        return run(entry, self.data, budget, self.folder, self.say, self.turns, self._counted)


def _loss(record: Record) -> float:
    """A loss that was not finite is None in a record."""
    loss = record["validation_loss"]
    return math.inf if loss is None else float(loss)
