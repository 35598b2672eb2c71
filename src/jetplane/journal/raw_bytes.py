"""Tensors as bytes, and back, with torch and the standard library alone."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["DIGEST", "bytes_of", "digest", "dtype_of", "name_of", "tensor_of"]

DIGEST = 16  # bytes


def bytes_of(tensor: Tensor) -> bytes:
    """The entries in order, as they lie in memory.

    Example:
        >>> bytes_of(torch.tensor([1, 2], dtype=torch.int16))
        b'\\x01\\x00\\x02\\x00'
    """
    plain = _plain(tensor)
    return bytes(_view(plain))


def tensor_of(data: bytes, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
    """The tensor with these bytes, on the CPU."""
    shape = tuple(shape)
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def digest(tensors: Iterable[Tensor], text: str = "") -> bytes:
    """A checksum over a text and the bits of tensors."""
    found = hashlib.blake2b(text.encode(), digest_size=DIGEST)
    for tensor in tensors:
        plain = _plain(tensor)  # which has to be there for as long as its memory is looked at
        found.update(_view(plain))
    return found.digest()


def name_of(dtype: torch.dtype) -> str:
    """What a file calls a dtype.

    Example:
        >>> name_of(torch.bfloat16), dtype_of("bfloat16")
        ('bfloat16', torch.bfloat16)
    """
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous()


def _view(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor on the CPU, for as long as the tensor is there."""
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b""
