"""A dataset as tensors."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from . import find, known
from .split import Split

__all__ = ["Dataset", "load"]


class Dataset(NamedTuple):
    """A dataset with where it was read from and the SHA-256 of each of its idx contents."""

    name: str
    train: Split
    test: Split
    source: str
    sha256: dict[str, str]


def load(name: str = "mnist", data_dir: str | os.PathLike[str] | None = None, download: bool = True) -> Dataset:
    """Load "mnist", "fashion-mnist", "cifar-10" or "digits", the real subset of MNIST inside the package.

    The files are looked for in ``data_dir``, or the folder that JETPLANE_DATA names; then in the cache; and, with
    ``download``, where they are published. They are checked every time. A damaged file is an error, except in the
    cache: there it is reported and fetched again. ``digits`` needs none of this.

    >>> digits = load("digits")
    >>> digits.train.images.shape, digits.test.labels.bincount().tolist()
    (torch.Size([6000, 28, 28]), [100, 100, 100, 100, 100, 100, 100, 100, 100, 100])
    """
    entry = known.find(name)
    contents, source = find.obtain(entry, find.place(entry, data_dir), download)
    arrays = [contents[file.name].array for file in entry.files]
    train, test = (Split(images, labels.to(torch.int64)) for images, labels in (arrays[:2], arrays[2:]))
    return Dataset(name, train, test, source, {file.name: contents[file.name].sha256 for file in entry.files})
