"""Data that lies on the device, the order of an epoch, and the mean NLL and accuracy of a split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config import DTYPES, Config

if TYPE_CHECKING:
    from ..data import Dataset, Split

__all__ = ["Resident", "Samples", "available", "chunk", "evaluate", "order", "padded", "place", "weights"]

_CHUNK = {"cpu": 1_000, "cuda": 10_000}  # digits evaluated together: the CNN's activations then take 0.1 or 1 GB
_MASK = 2**64 - 1


@dataclass(frozen=True)
class Samples:
    """Scaled images and their labels on one device."""

    images: Tensor  # (N, 1, 28, 28) or (N, 3, 32, 32)
    labels: Tensor  # (N,), int64

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Resident:
    """The splits of a run on its device; several runs of one data set, device and dtype may share it."""

    train: Samples
    validation: Samples
    device: torch.device
    dtype: torch.dtype
    name: str
    hold_out: int
    sha256: dict[str, str]  # of the files that it was read from
    black: Tensor  # (C, 1, 1): what a black pixel is
    test: Samples | None = None  # the test split, where it is not the validation split: looked at once, at the end


def available(name: str) -> torch.device:
    """The device of this name, or a ValueError that says what is wrong with it."""
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device is {name!r}, but torch finds no CUDA device; expected cpu.")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device is {name!r}, but there are {torch.cuda.device_count()} CUDA devices.")
    elif device.type != "cpu":
        raise ValueError(f"device is {name!r}; expected cpu or cuda.")
    return device


def place(dataset: Dataset | None, config: Config, data_dir: str | None = None) -> Resident:
    """The data of ``config`` on its device; None loads the data set that it names."""
    from .. import data  # here, so that what reads files is imported where there are files to read

    device, dtype = available(config.device), DTYPES[config.dtype]
    if dataset is None:
        dataset = data.load(config.dataset, data_dir)
    train, validation = dataset.train, dataset.test
    if config.hold_out:
        if config.hold_out >= len(train.labels):
            raise ValueError(
                f"hold_out is {config.hold_out}, but the training split of {dataset.name} has {len(train.labels)} "
                "digits; expected fewer."
            )
        train, validation = data.hold_out(train, config.hold_out)
    for name, split in (("training", train), ("validation", validation)):
        if not len(split.labels):
            raise ValueError(f"the {name} split of {dataset.name} is empty; expected at least one digit.")

    def on_device(split: Split) -> Samples:
        return Samples(data.scaled(split.images, device, dtype), split.labels.to(device))

    images = data.scaled(train.images[:1], device, dtype)
    return Resident(
        *(on_device(train), on_device(validation), device, dtype),
        name=dataset.name,
        hold_out=config.hold_out,
        sha256=dataset.sha256,
        black=data.black(images),
        test=on_device(dataset.test) if config.hold_out and len(dataset.test.labels) else None,
    )


def order(count: int, seed: int, epoch: int, device: torch.device) -> Tensor:
    """The order of an epoch on the device: a random permutation of 0 ... count - 1.

    A function of (seed, epoch) alone: torch.randperm with a generator of its own on the CPU, seeded with
    `mixed(seed, epoch)`. Moved to the device at once.

    Example:
        >>> sorted(order(5, seed=0, epoch=1, device=torch.device("cpu")).tolist())
        [0, 1, 2, 3, 4]
    """
    generator = torch.Generator().manual_seed(mixed(seed, epoch))
    return torch.randperm(count, generator=generator, device="cpu").to(device)


def padded(order: Tensor, size: int) -> Tensor:
    """All batches of an epoch, (n, size), the last one filled up: one shape is compiled once.

    A sample i that fills up is -1 - i: it has no loss, but batch norms see it. They are the first of the epoch.

    Example:
        >>> padded(torch.arange(5), 2)
        tensor([[ 0,  1],
                [ 2,  3],
                [ 4, -1]])
    """
    size = min(size, len(order))
    return torch.cat([order, -1 - order[: -len(order) % size]]).reshape(-1, size)


def weights(batches: Tensor) -> Tensor:
    """For each place of such batches, what makes the mean of the losses that of the samples that are there.

    Example:
        >>> weights(torch.tensor([[2, 3], [4, -1]]))
        tensor([[1., 1.],
                [2., 2.]], dtype=torch.float64)
    """
    there = (batches >= 0).sum(-1, keepdim=True, dtype=torch.float64)
    return (batches.shape[-1] / there).expand(batches.shape)


def mixed(seed: int, epoch: int) -> int:
    """A number below 2^63 from (seed, epoch): the finaliser of SplitMix64 over seed + (epoch + 1) * golden ratio.

    Neighbouring seeds and epochs give numbers without a visible relation, so no two runs share their orders.

    Example:
        >>> len({mixed(seed, epoch) for seed in range(50) for epoch in range(50)})
        2500
    """
    z = (_scrambled(seed) + (epoch + 1) * 0x9E3779B97F4A7C15) & _MASK
    return _scrambled(z) >> 1


def _scrambled(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@torch.no_grad()
def evaluate(model: nn.Module, samples: Samples) -> tuple[float, float]:
    """The mean NLL and the accuracy over a split, in large chunks; sums in float64, fetched once."""
    training = model.training
    model.eval()
    try:
        sums = [_sums(model, images, labels) for images, labels in _chunks(samples)]
    finally:
        model.train(training)
    nll, hits = torch.stack(sums).sum(0).tolist()
    return nll / len(samples), hits / len(samples)


def _chunks(samples: Samples) -> Iterator[tuple[Tensor, Tensor]]:
    size = chunk(samples.labels.device)
    yield from zip(samples.images.split(size), samples.labels.split(size), strict=True)


def chunk(device: torch.device) -> int:
    """How many samples are evaluated together."""
    return _CHUNK[device.type]


def _sums(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    logits = model(images)
    nll = functional.cross_entropy(logits, labels, reduction="none").sum(dtype=torch.float64)
    return torch.stack([nll, (logits.argmax(1) == labels).sum().to(torch.float64)])
