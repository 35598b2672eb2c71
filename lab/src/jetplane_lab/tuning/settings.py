"""What a study is asked for, and the file that says so."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetplane_lab.training import durable as files

if TYPE_CHECKING:
    from jetplane_lab.data import Dataset
    from jetplane_lab.presets import Preset

__all__ = ["SAMPLERS", "Settings", "write_json"]

SAMPLERS = ("bayes", "random", "grid")
_CHOSEN = ("lr", "batch_size", "epochs", "seed", "hold_out")  # fields of a Config that the study sets itself


@dataclass(frozen=True)
class Settings:
    """A study: a preset, a space, a sampler and its size. Two processes share a study if all of this agrees.

    ``trials`` alone may be raised later, except on a grid, whose points depend on it.
    """

    preset: str
    sampler: str
    trials: int
    epochs: int
    lr_bounds: tuple[float, float]  # of a log-uniform learning rate
    batch_sizes: tuple[int, ...]
    hold_out: int  # examples of the training set on which a trial is scored
    seed: int = 0  # of the sampler and of every trial's training
    warmup: int = 1  # epochs before a trial can be pruned
    config: dict[str, Any] = field(default_factory=dict)  # of the preset, less what the study sets
    data: dict[str, str] = field(default_factory=dict)  # SHA-256 of the files

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr_bounds", tuple(self.lr_bounds))
        object.__setattr__(self, "batch_sizes", tuple(self.batch_sizes))
        if self.sampler not in SAMPLERS:
            raise ValueError(f"sampler is {self.sampler!r}; expected one of {', '.join(SAMPLERS)}")
        for name in ("trials", "epochs", "hold_out", "warmup"):
            _whole(name, getattr(self, name), at_least=1)
        _whole("seed", self.seed, at_least=0)
        if len(self.lr_bounds) != 2 or not all(isinstance(lr, int | float) for lr in self.lr_bounds):
            raise ValueError(f"lr_bounds is {list(self.lr_bounds)}; expected two numbers")
        low, high = self.lr_bounds
        if not (0 < low < high < math.inf):
            raise ValueError(f"lr_bounds is [{low}, {high}]; expected two positive numbers, the smaller first")
        if not self.batch_sizes or len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise ValueError(f"batch_sizes is {list(self.batch_sizes)}; expected different whole numbers, at least one")
        for size in self.batch_sizes:
            _whole("batch_sizes", size, at_least=1)

    @classmethod
    def of(cls, preset: Preset, dataset: Dataset, **given: Any) -> Settings:
        """The settings for a preset: the paper's search space and split, where nothing else is ``given``.

        Logistic regression is searched over batch sizes 128, 512, 1024 and 2048, the CNN with 2048 alone. A twelfth of
        the training set is held out: 5,000 of MNIST's 60,000. Without bounds of the paper the learning rate ranges from
        a tenth to ten times the preset's.
        """
        count, lr = len(dataset.train.labels), preset.config.lr
        sizes: tuple[int, ...] = (128, 512, 1024, 2048) if preset.config.model == "logistic-regression" else (2048,)
        given = {name: value for name, value in given.items() if value is not None}
        epochs = given.get("epochs", 50)
        defaults = {
            "sampler": "bayes",
            "trials": 100,
            "epochs": epochs,
            "lr_bounds": preset.paper.lr_bounds if preset.paper else (lr / 10, lr * 10),
            "batch_sizes": sizes,
            "hold_out": max(1, count // 12),
            "warmup": max(1, epochs // 5) if isinstance(epochs, int) else 1,
        }
        settings = cls(preset.name, **{**defaults, **given}, config=_base(preset.config), data=dict(dataset.sha256))
        if settings.hold_out >= count:
            raise ValueError(f"hold_out is {settings.hold_out}; expected fewer than the {count} training examples")
        return settings

    def differs(self, other: Settings) -> str | None:
        """The first field in which ``other`` is another study, in words, or None."""
        ours, theirs = _flat(self), _flat(other)
        free = set() if self.sampler == "grid" else {"trials"}
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            if name not in free and ours.get(name) != theirs.get(name):
                return f"{name} is {json.dumps(theirs.get(name))} there and {json.dumps(ours.get(name))} here"
        return None

    def save(self, path: Path) -> None:
        """Write the settings."""
        write_json(path, {"settings": dataclasses.asdict(self)})

    @classmethod
    def read(cls, path: Path) -> Settings:
        """The settings in ``path``."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8"))["settings"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}); expected the settings of a study") from None


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` so that a reader sees the old contents or the new, never a part."""
    files.replace(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def _base(config: Any) -> dict[str, Any]:
    fields = {name: value for name, value in dataclasses.asdict(config).items() if name not in _CHOSEN}
    fields["device"] = str(fields.get("device")).partition(":")[0]  # the GPUs of one machine may share a study
    base: dict[str, Any] = json.loads(json.dumps(fields))
    return base


def _flat(settings: Settings) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(settings)))
    nested = {name: values.pop(name) for name in ("config", "data")}
    return values | {f"{name}.{key}": value for name, inner in nested.items() for key, value in inner.items()}


def _whole(name: str, value: Any, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name} is {value!r}; expected a whole number of at least {at_least}")
