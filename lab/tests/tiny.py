"""A data set of few digits and short runs on it, for the tests of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from jetplane_lab.data import Dataset, Split
from jetplane_lab.training import Config, Metrics, Trainer

# what is not a function of the config
MEASURED = ("seconds", "evaluation_seconds", "peak_memory")


def dataset(train: int = 50, test: int = 20) -> Dataset:
    """Blurred templates of ten classes with noise: hard enough that training goes on for some epochs."""
    generator = torch.Generator().manual_seed(5)
    templates = torch.randint(0, 120, (10, 28, 28), generator=generator)

    def split(count: int) -> Split:
        labels = torch.arange(count) % 10
        noise = torch.randint(0, 120, (count, 28, 28), generator=generator)
        return Split((templates[labels] + noise).to(torch.uint8), labels)

    return Dataset("tiny", split(train), split(test), "made up", {})


def config(**changes: Any) -> Config:
    """Four epochs of three batches, the last one smaller, of logistic regression."""
    base = {"model": "logistic-regression", "method": "fomoh-kd", "k": 2, "lr": 0.05, "batch_size": 20, "epochs": 4}
    base |= {"dataset": "tiny", "seed": 3}
    if changes.get("method", "fomoh-kd") not in ("fgd", "fomoh-kd"):
        base["k"] = 1
    return Config(**base | changes)


def trainer(folder: Path | None = None, /, *, callbacks: Any = (), scheduler: Any = None, **changes: Any) -> Trainer:
    """A run that writes a checkpoint after every epoch and may not warn."""

    def refuse(sentence: str) -> None:
        raise AssertionError(sentence)

    return Trainer(
        config(**changes), dataset(), folder, callbacks, scheduler=scheduler, checkpoint_seconds=0.0, warn=refuse
    )


def advance(run: Trainer, epochs: int) -> None:
    """Train so many epochs, and leave it."""
    work = run.epochs()
    for _ in range(epochs):
        next(work)
    work.close()  # type: ignore[attr-defined]


def numbers(metrics: Metrics) -> dict[str, Any]:
    """What must be equal in two runs of one config."""
    return {name: value for name, value in vars(metrics).items() if name not in MEASURED}


def assert_same(run: Trainer, other: Trainer) -> None:
    """The two runs are equal bit for bit: parameters, optimizer, and the metrics of every epoch."""
    for (name, ours), theirs in zip(run.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert_equal(run.method.state_dict(), other.method.state_dict())
    assert run.schedule.state_dict() == other.schedule.state_dict()
    assert [numbers(one) for one in run.history] == [numbers(one) for one in other.history]


def assert_equal(a: Any, b: Any) -> None:
    """Two trees of state are equal bit for bit."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert type(a) is type(b)
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other)
    else:
        assert a == b
