"""MNIST, Fashion-MNIST, and a real subset of MNIST inside the package: found, checked, and handed out as tensors."""

from .dataset import Dataset, load
from .errors import DamagedData, DataError, DataNotFound
from .known import DATASETS
from .split import Split, hold_out, scaled

__all__ = [
    "DATASETS",
    "DamagedData",
    "DataError",
    "DataNotFound",
    "Dataset",
    "Split",
    "hold_out",
    "load",
    "scaled",
]
