"""The idx format of the MNIST files: bytes to a tensor and back, and their gzip wrapping.

An idx file is two zero bytes, a type (8: unsigned byte), the number of dimensions, each dimension as a big-endian
32-bit number, and the elements in row-major order. Only unsigned bytes are read here: nothing else is in use.
"""

from __future__ import annotations

import ctypes
import gzip
import io
import math
import struct
import zlib

import torch
from torch import Tensor

from .errors import MalformedFile

__all__ = ["decode", "encode", "pack", "size", "unpack"]

_UNSIGNED_BYTE = 8
_GZIP_MAGIC = b"\x1f\x8b"


def size(shape: tuple[int, ...]) -> int:
    """Bytes of the idx file of an array of this shape.

    >>> size((60_000, 28, 28))
    47040016
    """
    return 4 + 4 * len(shape) + math.prod(shape)


def encode(array: Tensor) -> bytes:
    """The idx file of an array of unsigned bytes.

    >>> encode(torch.tensor([7, 2], dtype=torch.uint8)).hex(" ", 4)
    '0000 08010000 00020702'
    """
    if array.dtype != torch.uint8 or not 1 <= array.dim() <= 255:
        raise ValueError(
            f"the array has dtype {array.dtype} and {array.dim()} dimensions; expected torch.uint8, 1 to 255"
        )
    header = struct.pack(f">HBB{array.dim()}I", 0, _UNSIGNED_BYTE, array.dim(), *array.shape)
    rows = array.cpu().contiguous()
    # ctypes, because a tensor gives its bytes by way of numpy alone, which may be absent
    return header + ctypes.string_at(rows.data_ptr(), rows.numel())


def decode(content: bytes) -> Tensor:
    """The array, uint8, of an idx file.

    >>> decode(encode(torch.eye(2, dtype=torch.uint8))).tolist()
    [[1, 0], [0, 1]]
    """
    if len(content) < 4:
        raise MalformedFile(f"it holds {len(content)} bytes, too few for an idx file")
    zeros, kind, dimensions = struct.unpack_from(">HBB", content)
    if zeros != 0 or kind != _UNSIGNED_BYTE or dimensions == 0:
        raise MalformedFile(
            f"it begins with {content[:4].hex()}, and an idx file of unsigned bytes with 000008 and 01 to ff"
        )
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise MalformedFile(f"it holds {len(content)} bytes, fewer than its header of {start}")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    if len(content) != size(shape):
        text = " x ".join(map(str, shape))
        raise MalformedFile(f"it holds {len(content)} bytes, but its header says {text}, which takes {size(shape)}")
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=torch.uint8)
    # a bytearray, because torch warns of tensors over memory that must not be written to
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(shape)


def pack(content: bytes, level: int = 6) -> bytes:
    """The content in gzip; without the time of day, so that the same content gives the same file."""
    return gzip.compress(content, compresslevel=level, mtime=0)


def unpack(raw: bytes, limit: int) -> bytes:
    """What is inside ``raw``, be it gzip or plain, of at most ``limit`` bytes."""
    if not raw.startswith(_GZIP_MAGIC):
        return raw
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            content = file.read(limit + 1)  # one more than the limit: the end, and with it the checksum, is read too
    except (EOFError, OSError, zlib.error) as error:
        raise MalformedFile(f"its gzip data cannot be read ({' '.join(str(error).split()).rstrip('.')})") from error
    if len(content) > limit:
        raise MalformedFile(f"its gzip data unpacks to more than the {limit} bytes expected")
    return content
