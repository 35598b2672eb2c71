"""What identifies a run of a contest, what all runs share, and the model that each of them begins with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from .encoder import Classifier, Pretrained, classifier
from .low_rank import add_adapters
from .tokens import Texts

__all__ = ["Data", "Entry", "Settings", "build", "losses_of"]


@dataclass(frozen=True)
class Settings:
    """What all runs of a contest share."""

    source: str = "rotten-tomatoes"
    length: int = 64  # word pieces of a text
    batch: int = 32
    epochs: int = 3
    rank: int = 8  # of LoRA
    alpha: float = 16.0
    layers: int | None = None  # of the encoder, the first ones; None: all
    texts: int | None = None  # of each split, the first ones; None: all
    timed: int = 50  # steps whose times are taken, in five calls
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
        """Of its files."""
        end = "" if self.tested else "-choice"
        return f"{self.moving}-{self.method}-{self.rate:g}-seed-{self.seed}{end}"


@dataclass(frozen=True)
class Data:
    """The model before, and the splits on the device."""

    start: Pretrained
    train: Texts
    validation: Texts
    test: Texts


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
