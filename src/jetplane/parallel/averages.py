"""The mean over the parts of a batch: the closures of one step, each with its weight, in one process or in many.

A step asks for four things of its closures, their model in a plane, their loss, their gradient and which parameters
they use, and for a few numbers that all processes have to agree on. Alone nothing has to be said to anyone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..ad.algebra.jet import Jet, PairSet, Quadratic
from ..ad.run.passes import Chunk, chunks
from ..curvature import Curvature, NoCurvature
from ..solvers import Status, Step
from .columns import Columns
from .digests import tag_of
from .packed import Parcel
from .processes import Processes, named, require_same

__all__ = ["Averages", "Together", "Weighted", "heard", "sent"]

log = logging.getLogger("jetplane")

_STATUSES = list(Status)


class Averages:
    """Closures that count the same, in a process that is alone."""

    weights: list[float] | None = None
    repeats = False  # a plane may take several passes for the processes' sake
    absent: Sequence[int] = ()  # processes that were left out

    def work(self, pairs: PairSet, size: int | None, late: bool) -> list[Chunk]:
        """The passes of a plane."""
        return chunks(pairs, size, late)

    def passes(self, work: list[Chunk], run: Callable[[Chunk], list[Jet]]) -> list[list[Jet]]:
        """The jets of all of them, of each the closures'."""
        return [run(chunk) for chunk in work]

    def planes(self, curvature: Curvature, k: int) -> AbstractContextManager[None]:
        """Around the passes for a model."""
        return nullcontext()

    def single(self, what: str) -> AbstractContextManager[None]:
        """Around the passes for a loss, or a gradient."""
        return nullcontext()

    def known(self, k: int, curvature: Curvature, used: list[bool], device: torch.device) -> Quadratic | None:
        """The model of K directions that others have made without this process; ``used`` is written."""
        return None

    def model(self, models: list[Quadratic], counts: list[int], curvature: Curvature, used: list[bool]) -> Quadratic:
        """The mean of the closures' models; ``counts`` are the samples whose losses each is the mean of, or 0.

        ``used`` says which parameters were used, and is written: by any process.
        """
        total = sum(models[1:], models[0])
        return total / len(models) if len(models) > 1 else total

    def loss(self, losses: list[Tensor]) -> Tensor:
        """The mean of the closures' losses."""
        total: Tensor = sum(losses[1:], losses[0]) / len(losses)
        return total

    def gradient(self, total: list[Tensor], count: int) -> list[Tensor]:
        """The mean of the closures' gradients, of which ``total`` is the sum, each times its weight."""
        return [part / count for part in total] if count > 1 else total

    def steps(self, compute: Callable[[], list[Step]], models: list[Quadratic]) -> list[Step]:
        """The steps that a solver finds."""
        return compute()

    def agreed(self, compute: Callable[[], list[float]], length: int) -> list[float]:
        """Numbers that all processes go on with."""
        return compute()

    def everywhere(self, holds: bool) -> bool:
        """Whether something holds on all processes."""
        return holds


class Weighted(Averages):
    """Closures with weights, in a process that is alone: the same arithmetic as that of as many processes."""

    def __init__(self, weights: Sequence[float], noise: bool) -> None:
        self.weights = list(weights)
        self._noise = noise

    def model(self, models: list[Quadratic], counts: list[int], curvature: Curvature, used: list[bool]) -> Quadratic:
        form = self._form(curvature, models[0].k)
        return form.model(form.merged(self._records(form, models, counts)), models[0])

    def loss(self, losses: list[Tensor]) -> Tensor:
        return _mean(self._sums(losses)).to(losses[0])

    def gradient(self, total: list[Tensor], count: int) -> list[Tensor]:
        assert self.weights is not None
        return [part / sum(self.weights) for part in total]

    def _form(self, curvature: Curvature, k: int) -> Parcel:
        return Parcel(k, not isinstance(curvature, NoCurvature), self._noise)

    def _records(self, form: Parcel, models: list[Quadratic], counts: list[int], tag: float = 0.0) -> list[Tensor]:
        assert self.weights is not None
        parts = zip(models, self.weights, counts, strict=True)
        return [form.packed(model, weight, count, tag) for model, weight, count in parts]

    def _sums(self, losses: list[Tensor]) -> Tensor:
        """[W, W loss] of the closures here."""
        assert self.weights is not None
        total = torch.zeros(2, dtype=torch.float64, device="cpu")
        for loss, weight in zip(losses, self.weights, strict=True):
            total += _weighed(loss, weight)
        return total


class Together(Weighted):
    """Closures of all processes of a group. ``signs`` is what has to be the same in each step, by name.

    The first process of ``everyone`` solves and decides; ``columns`` are those that share the directions.
    """

    def __init__(
        self,
        processes: Processes,
        weights: Sequence[float],
        noise: bool,
        signs: dict[str, Any],
        what: str,
        everyone: Processes | None = None,
        columns: Columns | None = None,
    ) -> None:
        super().__init__(weights, noise)
        self._processes, self._signs, self._what = processes, signs, what
        self._everyone, self._columns = processes if everyone is None else everyone, columns
        self.repeats = columns is not None
        self.blamed: list[int] = []  # processes whose numbers were not finite

    @contextmanager
    def planes(self, curvature: Curvature, k: int) -> Iterator[None]:
        with self._processes.telling(self._form(curvature, k).length, self._what):
            yield

    def work(self, pairs: PairSet, size: int | None, late: bool) -> list[Chunk]:
        return chunks(pairs, size, late) if self._columns is None else self._columns.work(pairs, size, late)

    def passes(self, work: list[Chunk], run: Callable[[Chunk], list[Jet]]) -> list[list[Jet]]:
        return super().passes(work, run) if self._columns is None else self._columns.passes(work, run, self._what)

    @contextmanager
    def single(self, what: str) -> Iterator[None]:
        with self._processes.telling(2, f"{self._what}, {what}"):
            yield

    def model(self, models: list[Quadratic], counts: list[int], curvature: Curvature, used: list[bool]) -> Quadratic:
        form = self._form(curvature, models[0].k)
        tag = tag_of([*self._signs.items(), used])
        mine = form.merged(self._records(form, models, counts, tag))
        records = self._processes.gather(mine, self._what)
        if any(record[0] != tag for record in records):
            self._compare(used)
        self._blame(records)
        total = form.merged(records)
        if total[1] == 0:
            raise ValueError(f"the weights of all processes are zero at {self._what}; expected one that is not.")
        return form.model(total, models[0])

    def loss(self, losses: list[Tensor]) -> Tensor:
        return self._heard(self._sums(losses), "the loss at its end").to(losses[0])

    def gradient(self, total: list[Tensor], count: int) -> list[Tensor]:
        what = f"{self._what}, its gradient"
        assert self.weights is not None
        mine = torch.tensor([sum(self.weights), 0.0], dtype=torch.float64, device="cpu")
        weight = float(sum(record[0] for record in self._processes.gather(mine, what)))
        return [part / weight for part in self._processes.sums(total, what)]

    def steps(self, compute: Callable[[], list[Step]], models: list[Quadratic]) -> list[Step]:
        sizes = [model.k + 2 for model in models]
        numbers = self._everyone.led(lambda: torch.cat([sent(step) for step in compute()]), sum(sizes), self._what)
        return [heard(part, model.slope) for part, model in zip(numbers.split(sizes), models, strict=True)]

    def agreed(self, compute: Callable[[], list[float]], length: int) -> list[float]:
        return self._everyone.led(
            lambda: torch.tensor(compute(), dtype=torch.float64, device="cpu"), length, self._what
        ).tolist()

    def everywhere(self, holds: bool) -> bool:
        mine = torch.tensor([float(holds)], dtype=torch.float64, device="cpu")
        return all(bool(one) for one in self._everyone.gather(mine, self._what))

    def _heard(self, mine: Tensor, what: str) -> Tensor:
        records = self._processes.gather(mine, f"{self._what}, {what}")
        self._blame(records)
        total = records[0].clone()
        for record in records[1:]:
            total += record
        return _mean(total)

    def _blame(self, records: Sequence[Tensor]) -> None:
        bad = [rank for rank, record in enumerate(records) if not bool(torch.isfinite(record).all())]
        self.blamed = self._processes.known(bad)
        if self.blamed:
            log.warning("The numbers of %s are not finite at %s.", named(self.blamed), self._what)

    def _compare(self, used: list[bool]) -> None:
        """Processes say different things: that is an error, unless it is which parameters they use."""
        parts = [
            json.loads(text) for text in self._processes.texts(json.dumps({**self._signs, "used": used}), self._what)
        ]
        everywhere = [part.pop("used") for part in parts]
        require_same(parts, self._what)
        used[:] = [any(one) for one in zip(*everywhere, strict=True)]


def _weighed(loss: Tensor, weight: float) -> Tensor:
    """[W, W loss]"""
    if weight == 0:
        return torch.zeros(2, dtype=torch.float64, device="cpu")
    number = loss.detach().to("cpu", torch.float64).reshape(()) * weight
    return torch.stack([torch.tensor(weight, dtype=torch.float64, device="cpu"), number])


def _mean(sums: Tensor) -> Tensor:
    return sums[1] / sums[0]


def sent(step: Step) -> Tensor:
    """[status, predicted, coefficients]"""
    status = torch.tensor([float(_STATUSES.index(step.status))], dtype=torch.float64, device="cpu")
    numbers = [part.detach().to("cpu", torch.float64).reshape(-1) for part in (step.predicted, step.coefficients)]
    return torch.cat([status, *numbers])


def heard(numbers: Tensor, like: Tensor) -> Step:
    """The step that was sent, in the dtype and on the device of ``like``."""
    status, predicted, coefficients = _STATUSES[int(numbers[0])], numbers[1], numbers[2:]
    return Step(coefficients.to(like), status, predicted.to(like))
