"""One run of a contest: a method fine-tunes the model, and what came of it is a record, a JSON file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..bench.machine import environment
from ..cost import forward_equivalents
from ..data import files
from ..methods import Method, average_of, scheduled
from ..training.batches import order
from ..training.memory import Peak, kind
from ..training.precision import arithmetic
from .contestants import CONTESTANTS, Contestant, moving
from .encoder import Classifier, Pretrained, classifier
from .low_rank import add_adapters
from .tokens import Texts
from .turns_on_device import Turns

__all__ = ["Data", "Entry", "Settings", "passes_of", "read", "run"]

_PORTIONS = 18  # of a run: the rate falls from one to the next
_LOOKS = 6  # at the validation split
_CHUNK = 256  # texts evaluated together
_TIMED = 5, 10  # calls, and steps of each


@dataclass(frozen=True)
class Settings:
    """What all runs of a contest share."""

    source: str = "rotten-tomatoes"
    length: int = 64
    batch: int = 32
    epochs: int = 3
    rank: int = 8
    alpha: float = 16.0
    layers: int | None = None  # of the encoder, the first ones; None: all
    texts: int | None = None  # of each split, the first ones; None: all
    device: str = "cpu"
    compile: bool = False
    tf32: bool = False


@dataclass(frozen=True)
class Entry:
    """The identity of a run. Without ``tested`` the test split is not looked at."""

    method: str
    moving: str
    rate: float
    seed: int
    tested: bool
    settings: Settings

    @property
    def name(self) -> str:
        """Of its file."""
        end = "" if self.tested else "-choice"
        return f"{self.moving}-{self.method}-{self.rate:g}-seed-{self.seed}{end}.json"


@dataclass(frozen=True)
class Data:
    """The model before, and the splits on the device."""

    start: Pretrained
    train: Texts
    validation: Texts
    test: Texts


def read(path: Path, entry: Entry | None = None) -> dict[str, Any] | None:
    """The record of a file, if it is there and whole, and of this entry where one is given."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        same = entry is None or record["entry"] == json.loads(json.dumps(dataclasses.asdict(entry)))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if same else None


def run(
    entry: Entry, data: Data, budget: float, folder: Path, say: Callable[[str], None], turns: Turns
) -> dict[str, Any]:
    """The record of a run: that of the folder, or of training now. ``budget``: forward passes of a batch."""
    path = folder / entry.name
    found = read(path, entry)
    if found is None:
        with arithmetic(entry.settings.tf32):
            found = _Run(entry, data, budget, turns, say).record()
        files.write(path, (json.dumps(found, allow_nan=False, indent=1) + "\n").encode())
    return found


def build(entry: Entry, data: Data) -> Classifier:
    """The model of an entry before its first step."""
    model = classifier(data.start, 2, entry.seed)
    if entry.settings.layers is not None:
        model.encoder.encoder["layer"] = model.encoder.layers[: entry.settings.layers]
    if entry.moving == "lora":
        add_adapters(model, entry.settings.rank, entry.settings.alpha, entry.seed)
    return model.to(entry.settings.device)


def losses_of(model: Classifier, train: Texts, mean: bool) -> Callable[[Tensor], Tensor]:
    """The losses of samples, by their places, or their mean."""

    def losses(index: Tensor) -> Tensor:
        reduction = "mean" if mean else "none"
        return functional.cross_entropy(model(train.pieces[index]), train.good[index], reduction=reduction)

    return losses


def passes_of(entry: Entry, data: Data) -> float:
    """The forward passes of a batch that a step has, counted on a copy that is not compiled; without a first step's."""
    contestant, model = CONTESTANTS[entry.method], build(entry, data)
    contestant.prepare(model)
    method = contestant.make(model, entry.rate, entry.seed, False)
    losses = losses_of(model, data.train, not contestant.per_sample)
    index = torch.arange(entry.settings.batch, device=entry.settings.device)

    def step() -> None:
        with contestant.guarded():
            method.step(losses, index)

    step()
    counted = range(getattr(scheduled(method), "every", 1))  # HorizonAdam measures in one of so many
    with arithmetic(entry.settings.tf32):
        return statistics.mean(forward_equivalents(step, model, data.train.pieces[index]) for _ in counted)


class _Run:
    def __init__(self, entry: Entry, data: Data, budget: float, turns: Turns, say: Callable[[str], None]) -> None:
        self.entry, self.data, self.turns, self.say = entry, data, turns, say
        settings = entry.settings
        self.contestant: Contestant = CONTESTANTS[entry.method]
        self.device = torch.device(settings.device)
        self.passes = passes_of(entry, data)
        self.peak = Peak(self.device)
        self.model = build(entry, data)
        self.contestant.prepare(self.model)
        self.method: Method = self.contestant.make(self.model, entry.rate, entry.seed, settings.compile)
        self.losses = losses_of(self.model, data.train, not self.contestant.per_sample)
        epoch = len(data.train) // settings.batch
        steps = epoch * settings.epochs
        if self.contestant.by_passes:
            steps = max(1, round(budget / self.passes))
        self.batches = self._order(steps, epoch)
        self.curve: list[dict[str, float]] = []
        self.seconds = 0.0

    def _order(self, steps: int, epoch: int) -> Tensor:
        """The batches of all steps (steps, B); of an epoch the last, smaller one is left out."""
        settings, count = self.entry.settings, len(self.data.train)
        epochs = [
            order(count, self.entry.seed, number, self.device)[: epoch * settings.batch].view(epoch, settings.batch)
            for number in range(math.ceil(steps / epoch))
        ]
        return torch.cat(epochs)[:steps]

    def record(self) -> dict[str, Any]:
        portions = [part for part in self.batches.tensor_split(_PORTIONS) if len(part)]
        looks = {round((number + 1) * len(portions) / _LOOKS) for number in range(_LOOKS)}
        done, running = 0, math.nan
        for number, part in enumerate(portions, 1):
            if self.contestant.decays:
                for group in scheduled(self.method).param_groups:
                    group["lr"] = self.entry.rate * (1 - (number - 1) / len(portions))
            running = self._train(part)
            done += len(part)
            if number in looks or number == len(portions):
                self._look(done, running)
        held = self._held()
        found: dict[str, Any] = {
            "entry": dataclasses.asdict(self.entry),
            "label": self.contestant.label,
            "dropout": self.contestant.dropout,
            "steps": done,
            "passes_per_step": self.passes,
            "passes": done * self.passes,
            "moving": sum(leaf.numel() for leaf in moving(self.model)),
            "parameters": sum(leaf.numel() for leaf in self.model.parameters()),
            "curve": self.curve,
            "validation": self.curve[-1]["validation"],
            "validation_loss": self.curve[-1]["validation_loss"],
            "seconds": self.seconds,
            "held": held,  # bytes: parameters, buffers, and what the optimizer keeps
        }
        if self.entry.tested:
            found["test"], found["test_loss"] = self._evaluate(self.data.test)
            found |= self._measured()
        found["environment"] = environment(self.entry.settings.device, torch.get_num_threads())
        return found

    def _train(self, part: Tensor) -> float:
        """Steps on batches (n, B), and their mean loss."""
        with self.turns.together():
            began = time.perf_counter()
            with self.contestant.guarded():
                reports: Any = self._steps(part)
                loss = float(reports.loss.double().mean())
            self.seconds += time.perf_counter() - began
        return loss

    def _steps(self, part: Tensor) -> Any:
        return self.method.steps(self.losses, part)

    def _look(self, done: int, running: float) -> None:
        accuracy, loss = self._evaluate(self.data.validation)
        numbers = {
            **{"step": float(done), "passes": done * self.passes, "seconds": self.seconds},
            **{"loss": running, "validation": accuracy, "validation_loss": loss},
        }
        self.curve.append({name: value if math.isfinite(value) else -1.0 for name, value in numbers.items()})
        self.say(
            f"{self.entry.name.removesuffix('.json')}: {done} of {len(self.batches)} steps, loss {running:.4f}, "
            f"validation {accuracy:.2%}, {self.seconds:.0f} s"
        )

    @torch.no_grad()
    def _evaluate(self, texts: Texts) -> tuple[float, float]:
        """Accuracy and mean loss, of averaged parameters where the method keeps some."""
        training = self.model.training
        self.model.eval()
        with self.turns.together(), average_of(self.method) or contextlib.nullcontext():
            sums = torch.zeros(2, dtype=torch.float64, device=self.device)
            for pieces, good in zip(texts.pieces.split(_CHUNK), texts.good.split(_CHUNK), strict=True):
                logits = self.model(pieces)
                loss = functional.cross_entropy(logits, good, reduction="sum")
                sums += torch.stack([(logits.argmax(1) == good).sum().double(), loss.double()])
            hits, loss = (sums / len(texts)).tolist()
        self.model.train(training)
        return hits, loss if math.isfinite(loss) else -1.0

    def _held(self) -> int:
        """Bytes of parameters, buffers and the optimizer's state."""
        tensors = {id(one): one for one in (*self.model.parameters(), *self.model.buffers())}
        tensors |= {id(one): one for one in _tensors(self.method.state_dict())}
        return sum(one.numel() * one.element_size() for one in tensors.values())

    def _measured(self) -> dict[str, Any]:
        """What a step takes, with the device for itself: its time, and its peak with all that is held meanwhile."""
        calls, steps = _TIMED
        part = self.batches[:steps]
        with self.turns.alone(), self.contestant.guarded():
            self._steps(part)
            self._wait()
            times = []
            for _ in range(calls):
                began = time.perf_counter()
                self._steps(part)
                self._wait()
                times.append((time.perf_counter() - began) / len(part))
            # two steps are a graph that is recorded only now, so that what it takes is seen
            self.peak.clear()
            self._steps(part[:2])
            self._wait()
            peak = self.peak.read()
        return {"step_ms": 1e3 * statistics.median(times), "peak": peak, "peak_kind": kind(self.device)}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _tensors(state: Any) -> list[Tensor]:
    """The tensors of a state, which is nested."""
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, dict):
        return [one for part in state.values() for one in _tensors(part)]
    return [one for part in state for one in _tensors(part)] if isinstance(state, list | tuple) else []
