"""One run of a contest: a method fine-tunes the model, and what came of it is a record."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..bench.machine import environment
from ..methods import Method, average_of, scheduled
from ..training.batches import order
from ..training.memory import Peak
from ..training.precision import arithmetic
from .contestants import CONTESTANTS, Contestant, moving
from .entry import Data, Entry, build, losses_of
from .run_files import Record, RunFiles, Say, finite
from .step_cost import held_by, passes_of, peak_of, seconds_of
from .tokens import Texts
from .turns_on_device import Turns

__all__ = ["run"]

_PORTIONS = 18  # of a run: the rate falls from one to the next
_LOOKS = 6  # at the validation split
_CHUNK = 256  # texts evaluated together
_CHECKPOINT_SECONDS = 30.0  # between two checkpoints, at least
_TIMED_SECONDS = 60.0  # for the time of a step, about, where fewer steps take so long


def run(
    entry: Entry,
    data: Data,
    budget: float,
    folder: Path,
    say: Say,
    turns: Turns,
    count: Callable[[Entry, Data], float] = passes_of,
) -> Record:
    """The record of a run: that of the folder, or of training now. ``budget``: forward passes of a batch.

    A run that was stopped goes on from its checkpoint, and ends with the numbers of one that was not. ``count`` says
    how many passes a step has.
    """
    at = RunFiles(entry, folder, say)
    found = at.record()
    if found is None:
        with arithmetic(entry.settings.tf32):
            with _drawing(entry):
                passes = count(entry, data)
            with _drawing(entry):
                found = _Run(entry, data, passes, budget, turns, at).record()
        at.write(found)
    return found


@contextlib.contextmanager
def _drawing(entry: Entry) -> Iterator[None]:
    """Dropout draws from torch's generators: here from the seed, and outside as if nothing had been drawn."""
    device = torch.device(entry.settings.device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(entry.seed)
        yield


class _Run:
    def __init__(self, entry: Entry, data: Data, passes: float, budget: float, turns: Turns, at: RunFiles) -> None:
        self.entry, self.data, self.passes, self.turns, self.at = entry, data, passes, turns, at
        settings = entry.settings
        self.contestant: Contestant = CONTESTANTS[entry.method]
        self.device = torch.device(settings.device)
        self.peak = Peak(self.device)
        self.model = build(entry, data)
        self.contestant.prepare(self.model)
        self.method: Method = self.contestant.make(self.model, entry.rate, entry.seed, settings.compile)
        self.losses = losses_of(self.model, data.train, not self.contestant.per_sample)
        epoch = len(data.train) // settings.batch
        steps = epoch * settings.epochs
        if self.contestant.by_passes:
            steps = max(1, round(budget / passes))
        self.batches = self._order(steps, epoch)
        self.curve: list[dict[str, float | None]] = []
        self.seconds = 0.0
        self._saved = time.monotonic()

    def _order(self, steps: int, epoch: int) -> Tensor:
        """The batches of all steps (steps, B); of an epoch the last, smaller one is left out."""
        settings, count = self.entry.settings, len(self.data.train)
        epochs = [
            order(count, self.entry.seed, number, self.device)[: epoch * settings.batch].view(epoch, settings.batch)
            for number in range(math.ceil(steps / epoch))
        ]
        return torch.cat(epochs)[:steps]

    def record(self) -> Record:
        """Train, from the checkpoint where there is one, and measure."""
        portions = [part for part in self.batches.tensor_split(_PORTIONS) if len(part)]
        looks = {round((number + 1) * len(portions) / _LOOKS) for number in range(_LOOKS)} | {len(portions)}
        begin = self._resumed()
        done = sum(len(part) for part in portions[:begin])
        for number, part in enumerate(portions[begin:], begin + 1):
            if self.contestant.decays:
                for group in scheduled(self.method).param_groups:
                    group["lr"] = self.entry.rate * (1 - (number - 1) / len(portions))
            running = self._train(part)
            done += len(part)
            if number == 1:
                self._say_how_long(done)
            if number in looks:
                self._look(done, running)
            if number < len(portions):
                self._save(number)
        return self._summed(done)

    def _summed(self, done: int) -> Record:
        held = held_by(self.model, self.method)
        found: Record = {
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
            "held": held,  # bytes: parameters, buffers, gradients, and what the optimizer keeps
        }
        if self.entry.tested:
            hits, loss = self._evaluate(self.data.test)
            found |= {"test": hits, "test_loss": finite(loss), **self._measured()}
        found["environment"] = environment(self.entry.settings.device, torch.get_num_threads())
        return found

    # -- stopped and gone on with -----------------------------------------------------------------------------------

    def _resumed(self) -> int:
        """The portions that the checkpoint has."""
        state = self.at.load()
        if state is None:
            return 0
        self.model.load_state_dict(state.model)  # in place: one leaf stays one
        self.method.load_state_dict(state.optimizer)
        self.curve, self.seconds = list(state.progress["curve"]), state.progress["seconds"]
        torch.set_rng_state(state.progress["drawn"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state.progress["drawn there"], self.device)
        self.at.say(f"{self.entry.name}: goes on after {state.epoch} of {_PORTIONS} parts")
        return state.epoch

    def _save(self, portions: int) -> None:
        if time.monotonic() - self._saved < _CHECKPOINT_SECONDS:
            return
        progress: dict[str, Any] = {"curve": self.curve, "seconds": self.seconds, "drawn": torch.get_rng_state()}
        if self.device.type == "cuda":
            progress["drawn there"] = torch.cuda.get_rng_state(self.device)
        self.at.save(portions, dict(self.model.state_dict()), self.method.state_dict(), progress)
        self._saved = time.monotonic()

    # -- the parts of a run -----------------------------------------------------------------------------------------

    def _train(self, part: Tensor) -> float:
        """Steps on batches (n, B), and their mean loss."""
        with self.turns.together():
            began = time.perf_counter()
            reports = self._steps(part)
            loss = float(reports.loss.double().mean())
            self.seconds += time.perf_counter() - began
        return loss

    def _steps(self, part: Tensor) -> Any:
        with self.contestant.guarded():
            return self.method.steps(self.losses, part)

    def _say_how_long(self, done: int) -> None:
        """After the first part, planning and compiling included."""
        each = self.seconds / done
        minutes = each * (len(self.batches) - done) / 60
        self.at.say(f"{self.entry.name}: {each:.2g} s a step, {minutes:.0f} minutes for the rest, at most")

    def _look(self, done: int, running: float) -> None:
        accuracy, loss = self._evaluate(self.data.validation)
        self.curve.append(
            {
                **{"step": done, "passes": done * self.passes, "seconds": self.seconds},
                **{"loss": finite(running), "validation": accuracy, "validation_loss": finite(loss)},
            }
        )
        self.at.say(
            f"{self.entry.name}: {done} of {len(self.batches)} steps, loss {running:.4f}, "
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
        return hits, loss

    def _measured(self) -> Record:
        """What a step takes, with the device for itself: its time, and its peak with all that is held meanwhile."""
        most = int(_TIMED_SECONDS * len(self.batches) / max(self.seconds, 1e-9))
        with self.turns.alone():
            milliseconds = 1e3 * seconds_of(self._steps, self.batches, min(self.entry.settings.timed, max(1, most)))
            # two steps are a graph that is recorded only now, so that what it takes is seen
            peak, kind = peak_of(lambda: self._steps(self.batches[:2]), self.model, self.method, self.peak)
        return {"step_ms": milliseconds, "peak": peak, "peak_kind": kind}
