"""One training loop for all methods."""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from jetplane import forward_only

from .. import cost, methods, models
from ..config import DTYPES, FORWARD_GRADIENT, PER_SAMPLE, REVERSE, SECOND_ORDER, Config
from . import batches, environment, memory, schedules
from .augmentation import flipped_and_cropped
from .averaging import Average
from .batches import Resident
from .callbacks import Callback
from .checkpoint import State
from .folder import Folder
from .metrics import Metrics, Summary
from .precision import arithmetic
from .recording import Recording
from .statistics_of_norms import taken_anew
from .stopping import Stop, stop_signals
from .tally import Running, Tally
from .workers import ALONE, Workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..data import Dataset

__all__ = ["Trainer"]

_AT_ONCE = {"cpu": 8, "cuda": 1024}  # compiled steps that are launched together; on CUDA nothing waits for them
_AVERAGED = 8  # of these, where parameters are averaged: between two looks at them
_IGNORED = -100  # a label, to torch's losses
_PROBED = 50  # steps, of which a forward gradient looks at one to see how the samples lie
_AVERAGE = "average"  # its place in a checkpoint
_FOR_EPOCHS = 3  # that a loss must be far above the one at the start to be called diverged


@dataclass(frozen=True)
class Progress:
    """The plain numbers of a run that go on over its epochs."""

    start_loss: float | None = None  # of the first batch
    high: int = 0  # epochs in a row with a loss far above it
    forward_equivalents: float = 0.0
    seconds: float = 0.0
    evaluation_seconds: float = 0.0
    peak_memory: int = 0
    best_nll: float | None = None
    best_accuracy: float | None = None
    ending: tuple[str, str] | None = None  # reason and message


class Trainer:
    """A run: a config, the data, and where it stands.

    ``folder`` is where it is recorded; a checkpoint there is gone on from. ``dataset`` is a Dataset, data that
    `batches.place` put on the device, or None to load what the config names. ``scheduler`` makes the torch scheduler
    of the schedule "custom". ``journal`` has each step written down in the folder, too. A checkpoint is
    written after the epoch in which ``checkpoint_seconds`` have passed since the last one, and at the end. ``warn`` is
    told of damage that could be repaired; by default it is printed. With ``workers`` all processes train together, each
    on its part of every batch, and the first one alone may have a folder.

    Nothing here draws from torch's generators: initial values, order and directions are functions of the seed. So a
    run that is stopped and resumed is, bit for bit, the run that was not.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset | Resident | None = None,
        folder: Path | str | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        scheduler: schedules.MakeScheduler | None = None,
        checkpoint_seconds: float = 30.0,
        warn: Callable[[str], None] | None = None,
        journal: bool = False,
        workers: Workers = ALONE,
    ) -> None:
        if folder is not None and not workers.writes:
            raise ValueError(f"folder is {folder} in process {workers.rank}; expected None, for the first one writes.")
        if not checkpoint_seconds >= 0:
            raise ValueError(f"checkpoint_seconds is {checkpoint_seconds!r}; expected a number from 0.")
        self.config, self.workers = config, workers
        self.device = batches.available(config.device)
        self.callbacks = list(callbacks)
        self.data = dataset if isinstance(dataset, Resident) else batches.place(dataset, config)
        _check_data(self.data, config)
        self.model = models.build(config.model, config.seed).to(self.device, DTYPES[config.dtype])
        self.images = self.data.train.images  # that are trained on
        if config.augment:
            self.images = self.images.clone()  # one memory for all epochs: a graph reads there
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.method = methods.make(config, self.model.parameters(), workers.group)
        self.demand = memory.demand(self.model, self.data.train.images[: config.batch_size], config)
        memory.require([(self.demand, config.tangents)], self.device)
        self.optimizer = methods.scheduled(self.method)
        self.average = Average(self.model.parameters(), config.average) if config.average else None
        self.schedule = schedules.make(config, self.optimizer, scheduler)
        self.epoch = 0  # epochs that are done
        self.history: list[Metrics] = []
        self.summary: Summary | None = None
        self.together = 1
        self.stop = Stop()
        self._progress = Progress()
        self._in_epoch = False
        self._tally: Tally | None = None
        self._saved_epoch = 0
        self._checkpoint_seconds = checkpoint_seconds
        self._warn = warn or _print
        self._costs: dict[int, float] = {}  # forward-equivalents of a step, by batch size
        self._peak: memory.Peak | None = None
        self.recording = Recording(journal, folder, self.method, self.model)
        self.folder = None if folder is None else Folder(Path(folder), config, self._warn)
        try:
            self._resume()
        except BaseException:
            self.close()
            raise

    # -- training ---------------------------------------------------------------------------------------------------

    def fit(self) -> Summary:
        """Train to the end. SIGTERM, SIGHUP and Ctrl-C stop it after the epoch, with a checkpoint."""
        with stop_signals() as self.stop:
            for _ in self.epochs():
                pass
        assert self.summary is not None
        return self.summary

    def epochs(self) -> Iterator[Metrics]:
        """Train epoch by epoch; ``stop.by = "..."`` ends it after the one that runs."""
        for metrics in self.work():
            if metrics is not None:
                yield metrics

    def work(self) -> Generator[Metrics | None]:
        """Train step by step: None after each step (or group of compiled ones), and metrics after an epoch."""
        inner = self._work()
        try:
            while True:
                with arithmetic(self.config.tf32):  # about each piece of work, so that a caller never sees our setting
                    try:
                        item = next(inner)
                    except StopIteration:
                        return
                yield item
        finally:
            inner.close()

    def current_loss(self) -> float:
        """The loss of the last step of this epoch, NaN before the first. Waits for the device."""
        return math.nan if self._tally is None else self._tally.last()

    def current_lr(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def close(self) -> None:
        """Let go of the folder. Training does so by itself at its end."""
        self.recording.close()
        if self.folder is not None:
            self.folder.release()

    def _work(self) -> Generator[Metrics | None]:
        if self._in_epoch:
            raise RuntimeError(
                "the run was left in the middle of an epoch; expected a new Trainer, on its folder if it has one."
            )
        if self.folder is not None:
            self.folder.acquire()
        try:
            for callback in self.callbacks:
                callback.begin(self)
            if self._progress.ending is None:
                self._measure()
                self.workers.led(self.recording.begin, "the beginning of the journal")
            self._saved = time.monotonic()
            while self._progress.ending is None and self.stop.by is None:
                yield from self._train()
            self._end()
        finally:
            self.close()

    def _train(self) -> Generator[Metrics | None]:
        """One epoch."""
        self._in_epoch = True
        began = time.perf_counter()
        tally = self._tally = Tally(self.current_lr(), curved=self.config.method in SECOND_ORDER)
        seed, epoch = self.config.seed, self.epoch
        order = batches.order(len(self.data.train), seed, epoch, self.device)
        if self.config.augment:
            flipped_and_cropped(self.data.train.images, self.data.black, seed, epoch, out=self.images)
        full, rest = divmod(len(order), self.config.batch_size)
        sizes = [self.config.batch_size] * full + [rest] * bool(rest)
        for done in self._steps(order, sizes, tally):
            for callback in self.callbacks:
                callback.batch(self, done, len(sizes))
            yield None
        running = tally.fetch(self.workers.total)
        if self.workers.any(self.stop.by is not None) and self.stop.by is None:
            self.stop.by = "another process"
        seconds = time.perf_counter() - began
        assert self._peak is not None
        peak = self._peak.read()
        metrics = self._finish(running, len(sizes), seconds, peak)
        self._peak.clear()
        self._in_epoch = False
        for callback in self.callbacks:
            callback.epoch(self, metrics)
        yield metrics

    def _steps(self, order: Tensor, sizes: list[int], tally: Tally) -> Iterator[int]:
        """The steps of an epoch; how many are done, whenever there is time to say so."""
        if not self.config.compile:
            for done, index in enumerate(order.split(self.config.batch_size), 1):
                self.recording.at(self.epoch, done - 1)
                with self._guard():
                    self.method.step(self._loss, self.workers.shard(index), has_aux=True)
                tally.accumulate(self.method.report, len(index))
                if self.average is not None:
                    self.average.follow()
                yield done
            return
        done = 0
        most = _AT_ONCE[self.device.type] if self.average is None else _AVERAGED
        for group in batches.padded(order, self.config.batch_size).split(most):
            before, done = done, done + len(group)
            with self._guard():
                reports = self.method.steps(self._padded_loss, group, batches.weights(group), has_aux=True)
            tally.accumulate_steps(reports, sizes[before:done])
            if self.average is not None:
                self.average.follow(len(group))
            yield done

    def _guard(self) -> contextlib.AbstractContextManager[object]:
        """About each step, so that what is called forward-only is: a backward pass raises."""
        return contextlib.nullcontext() if self.config.method in REVERSE else forward_only()

    def _loss(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The mean NLL of a batch, and how many are recognised; of each digit where the method asks for it."""
        return self._loss_of(self.model, index)

    def _padded_loss(self, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The same of a batch that may be filled up; the mean is that over the digits that are there.

        ``weights`` make it that: a method that takes a part of the batch at a time cannot count those of all.
        """
        there = index >= 0
        place = torch.where(there, index, -1 - index)
        images, labels = self.images[place], self.data.train.labels[place]
        logits = self.model(images)
        labelled, reduction = torch.where(there, labels, _IGNORED), self._reduction
        loss = functional.cross_entropy(logits, labelled, ignore_index=_IGNORED, reduction=reduction)
        if reduction == "none":
            loss = loss * weights.to(loss)
        loss = self._penalised(loss, self.model)
        return loss, self._hits((logits.argmax(1) == labels) & there)

    def _loss_of(self, model: torch.nn.Module, index: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = self.images[index], self.data.train.labels[index]
        logits = model(images)
        loss = self._penalised(functional.cross_entropy(logits, labels, reduction=self._reduction), model)
        return loss, self._hits(logits.argmax(1) == labels)

    def _hits(self, recognised: Tensor) -> Tensor:
        """How many are recognised, as the losses are given: in all, or of each digit."""
        return recognised if self._reduction == "none" else recognised.sum()

    def _penalised(self, loss: Tensor, model: torch.nn.Module) -> Tensor:
        """The loss and the penalty on the weights, a part of the plane as the loss is; decay is a step beside it."""
        if not self.config.penalty:
            return loss
        squares = [weight.square().sum() for weight in model.parameters() if weight.ndim > 1]
        return loss + self.config.penalty / 2 * sum(squares[1:], squares[0])

    @property
    def _reduction(self) -> str:
        return "none" if self.config.method in PER_SAMPLE else "mean"

    @contextlib.contextmanager
    def judged(self) -> Iterator[None]:
        """The parameters by which the run is judged in the model, inside: an average, where there is one."""
        average = methods.average_of(self.method) if self.average is None else self.average.averaged()
        if average is None:
            yield
            return
        with average, taken_anew(self.model, self.images.split(batches.chunk(self.device))):
            yield

    def _finish(self, running: Running, steps: int, seconds: float, peak: int) -> Metrics:
        """Evaluate, schedule, judge and record an epoch."""
        lr = float(self.optimizer.param_groups[0]["lr"])
        began = time.perf_counter()
        self.epoch += 1
        last = self.epoch == self.config.epochs
        every = self.config.evaluate_train
        after: tuple[float | None, float | None] = (None, None)
        test: tuple[float | None, float | None] = (None, None)
        with self.judged():
            nll, accuracy = batches.evaluate(self.model, self.data.validation)
            if last or (every and self.epoch % every == 0):
                after = batches.evaluate(self.model, self.data.train)
            if last and self.data.test is not None:
                test = batches.evaluate(self.model, self.data.test)
        self.schedule.step(running.nll)
        spent = {"seconds": seconds, "evaluation_seconds": time.perf_counter() - began, "peak_memory": peak}
        progress = self._progress = self._advance(running, spent, nll, accuracy)
        metrics = Metrics(
            epoch=self.epoch,
            lr=lr,
            train_nll=running.nll,
            train_accuracy=running.accuracy,
            train_nll_after=after[0],
            train_accuracy_after=after[1],
            validation_nll=nll,
            validation_accuracy=accuracy,
            slope=running.slope,
            curvature=running.curvature,
            negative_curvature=running.negative_curvature,
            step_length=running.step_length,
            steps=steps,
            not_taken=running.not_taken,
            forward_equivalents=progress.forward_equivalents,
            seconds=progress.seconds,
            evaluation_seconds=progress.evaluation_seconds,
            peak_memory=progress.peak_memory,
            together=self.together,
            test_nll=test[0],
            test_accuracy=test[1],
        )
        self.history.append(metrics)
        if self.folder is not None:
            self.folder.append(metrics)
            due = time.monotonic() - self._saved >= self._checkpoint_seconds
            if due or progress.ending is not None or self.stop.by is not None:
                self._save(self.folder)
        return metrics

    def _advance(self, running: Running, spent: dict[str, Any], nll: float, accuracy: float) -> Progress:
        """The numbers after an epoch, and whether it was the last."""
        before = self._progress
        start = running.first_loss if before.start_loss is None else before.start_loss
        limit = math.inf if self.config.divergence is None else self.config.divergence
        high = before.high + 1 if running.nll > limit * start else 0
        ending = None
        if not math.isfinite(running.nll):
            ending = "diverged", f"diverged in epoch {self.epoch}: the running train NLL is {running.nll}."
        elif high >= _FOR_EPOCHS:
            ending = (
                "diverged",
                f"diverged in epoch {self.epoch}: for {_FOR_EPOCHS} epochs the running train NLL, now "
                f"{running.nll:.4g}, was above {limit:g} times the loss at the start, {start:.4g}.",
            )
        elif self.epoch >= self.config.epochs:
            ending = "finished", f"finished {self.epoch} epochs."
        return Progress(
            start_loss=start,
            high=high,
            forward_equivalents=before.forward_equivalents + self._epoch_cost(),
            seconds=before.seconds + spent["seconds"],
            evaluation_seconds=before.evaluation_seconds + spent["evaluation_seconds"],
            peak_memory=max(before.peak_memory, spent["peak_memory"]),
            best_nll=_best(min, before.best_nll, nll),
            best_accuracy=_best(max, before.best_accuracy, accuracy),
            ending=ending,
        )

    def _end(self) -> None:
        progress, ending = self._progress, self._progress.ending
        if ending is None:
            ending = "interrupted", f"stopped by {self.stop.by} after epoch {self.epoch} of {self.config.epochs}."
            self.stop = Stop()
            if self.folder is not None and self._saved_epoch != self.epoch:
                self._save(self.folder)
        self.summary = Summary(
            reason=ending[0],
            message=ending[1],
            epochs=self.epoch,
            final=self.history[-1] if self.history else None,
            best_validation_nll=progress.best_nll,
            best_validation_accuracy=progress.best_accuracy,
            parameters=self.parameters,
            forward_equivalents_per_step=self._costs.get(min(self.config.batch_size, len(self.data.train)), math.nan),
            seconds=progress.seconds,
            evaluation_seconds=progress.evaluation_seconds,
            peak_memory=progress.peak_memory,
            peak_memory_kind=memory.kind(self.device),
        )
        if self.folder is not None and progress.ending is not None:
            self.folder.finish(self.summary)
        for callback in self.callbacks:
            callback.end(self, self.summary)

    # -- cost -------------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """The cost of a step for each size of a batch, on copies; and from now on memory is watched."""
        count, size = len(self.data.train), self.config.batch_size
        # before: the process keeps what these steps take, so later ones would show no growth
        self._peak = memory.Peak(self.device)
        for batch in sorted({min(size, count), count % size} - {0}):
            self._costs[batch] = self._step_cost(batch)
        if self.device.type == "cuda":  # where memory is given back, only the run's own steps count
            self._peak = memory.Peak(self.device)

    def _step_cost(self, size: int) -> float:
        model = copy.deepcopy(self.model)
        # never the captured step: a graph's operations run unseen; and never that of many processes
        method = methods.make(self.config.replace(compile=False), model.parameters())
        index = torch.arange(size, device=self.device)

        def step() -> None:
            with self._guard():
                method.step(lambda index: self._loss_of(model, index), index, has_aux=True)

        def passes() -> float:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".* processes are initialised and .* has process_group=None")
                return cost.forward_equivalents(step, model, self.data.train.images[index])

        first = passes()
        if self.config.method not in FORWARD_GRADIENT:
            return first
        # the first step finds out how samples lie, as one of 50 does; of HorizonAdam's, one of ``every`` measures
        further = [passes() for _ in range(getattr(self.optimizer, "every", 1))]
        usual = sum(further) / len(further)
        return usual + (first - usual) / _PROBED

    def _epoch_cost(self) -> float:
        """Forward passes over the training split that an epoch amounts to."""
        count, size = len(self.data.train), self.config.batch_size
        full = count // size * size
        parts = [(min(size, count), full), (count % size, count - full)]
        return sum(self._costs[batch] * samples / count for batch, samples in parts if samples)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _save(self, folder: Folder) -> None:
        averaged = {} if self.average is None else {_AVERAGE: self.average.state_dict()}
        self.recording.commit()
        folder.save(
            State(
                config=self.config.digest(),
                epoch=self.epoch,
                model=self.model.state_dict(),
                optimizer=self.method.state_dict() | averaged,
                schedule=self.schedule.state_dict(),
                progress=asdict(self._progress) | {"costs": {str(k): v for k, v in self._costs.items()}},
                **folder.metrics_state(),
            )
        )
        self._saved, self._saved_epoch = time.monotonic(), self.epoch

    def _resume(self) -> None:
        """Go on where the folder's checkpoint is, in all processes."""
        state, history = self.workers.led(self._found, "the opening of the run's folder")
        if state is None:
            return
        self.model.load_state_dict(state.model)
        if self.average is not None:
            self.average.load_state_dict(state.optimizer[_AVERAGE])
        self.method.load_state_dict({name: part for name, part in state.optimizer.items() if name != _AVERAGE})
        self.schedule.load_state_dict(state.schedule)
        numbers = dict(state.progress)
        self._costs = {int(size): value for size, value in numbers.pop("costs").items()}
        self._progress = Progress(**numbers)
        self.epoch = self._saved_epoch = state.epoch
        self.history = history

    def _found(self) -> tuple[State | None, list[Metrics]]:
        """The folder's checkpoint, and the metrics so far."""
        if self.folder is None:
            return None, []
        state = self.folder.open(environment.describe(self.device) | {"data": self.data.sha256})
        return (None, []) if state is None else (state, self.folder.metrics())


def _best(choose: Any, before: float | None, now: float) -> float | None:
    """The better of two, where a value that is not finite is none."""
    if not math.isfinite(now):
        return before
    return now if before is None else choose(before, now)


def _check_data(data: Resident, config: Config) -> None:
    """Raise where the data is not what the config says, for the config is the run's identity."""
    wanted = (config.dataset, config.hold_out, torch.device(config.device), DTYPES[config.dtype])
    names = ("dataset", "hold_out", "device", "dtype")
    for name, there, here in zip(names, (data.name, data.hold_out, data.device, data.dtype), wanted, strict=True):
        if there != here:
            raise ValueError(f"the data given has {name} {there!s}, but the config {here!s}; expected the same.")
    shape, wanted_shape = tuple(data.train.images.shape[1:]), models.shape(config.model)
    if shape != wanted_shape:
        fitting = ", ".join(name for name in models.MODELS if models.shape(name) == shape) or "none here"
        raise ValueError(
            f"model {config.model} takes images {wanted_shape}, but those of {data.name} are {shape}; expected a model "
            f"for them: {fitting}."
        )


def _print(sentence: str) -> None:
    print(f"jetplane: {sentence}", file=sys.stderr, flush=True)
