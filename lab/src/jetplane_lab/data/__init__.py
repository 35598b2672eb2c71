"""MNIST, Fashion-MNIST, CIFAR-10, and a part of MNIST in the package: found, checked, and handed out as tensors."""

from .dataset import Dataset, load
from .errors import DamagedData, DataError, DataNotFound
from .known import DATASETS
from .split import Split, black, hold_out, scaled

__all__ = [
    "DATASETS",
    "DamagedData",
    "DataError",
    "DataNotFound",
    "Dataset",
    "Split",
    "black",
    "hold_out",
    "load",
    "scaled",
]
