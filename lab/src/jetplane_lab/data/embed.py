"""Makes the digits inside the package: ``python -m jetplane_lab.data.embed --data-dir DIR``.

The rule: the first 600 of each digit of MNIST's training files, and the first 100 of each of its test files, in the
order of the files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from . import check, files, find, idx, known
from .dataset import load
from .split import Split

__all__ = ["first_of_each", "main"]


def first_of_each(split: Split, count: int) -> Split:
    """The first ``count`` of each digit, in the order of ``split``.

    >>> first_of_each(Split(torch.zeros(5, 28, 28), torch.tensor([1, 0, 1, 1, 0])), 1).labels
    tensor([1, 0])
    """
    of_digit = torch.nn.functional.one_hot(split.labels, 10)
    earlier = of_digit.cumsum(0).gather(1, split.labels.unsqueeze(1)).squeeze(1)  # of the same digit, this one included
    chosen = earlier <= count
    return Split(split.images[chosen], split.labels[chosen])


def main(argv: Sequence[str] | None = None) -> int:
    """Write the four files, print their hashes, and return 0 if they are those that the package expects."""
    parser = argparse.ArgumentParser(prog="python -m jetplane_lab.data.embed", description=__doc__)
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="folder of MNIST's files")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: inside the package)")
    arguments = parser.parse_args(argv)
    mnist, digits = load("mnist", arguments.data_dir), known.find("digits")
    out = arguments.out or find.own(digits).folder
    train, test = first_of_each(mnist.train, 600), first_of_each(mnist.test, 100)
    contents = {
        known.TRAIN_IMAGES: idx.encode(train.images),
        known.TRAIN_LABELS: idx.encode(train.labels.to(torch.uint8)),
        known.TEST_IMAGES: idx.encode(test.images),
        known.TEST_LABELS: idx.encode(test.labels.to(torch.uint8)),
    }
    same = True
    for name, content in contents.items():
        files.write(out / f"{name}.gz", idx.pack(content, level=9))
        expected = check.sha256(content) == digits.file(name).sha256
        same = same and expected
        print(f"{check.sha256(content)}  {name}  {'as expected' if expected else 'not what the package expects'}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
