"""Texts as numbers: MiniLM's own word pieces, by the package tokenizers (the extra "text")."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..data.errors import DataError
from .reviews import Review

__all__ = ["Texts", "encode", "require_tokenizers"]


class Texts(NamedTuple):
    """Reviews as tensors of one length, on one device."""

    pieces: Tensor  # (N, T), int64; 0 fills up
    good: Tensor  # (N,), int64: 0 or 1

    def __len__(self) -> int:
        return len(self.good)

    def to(self, device: torch.device | str) -> Texts:
        """The same on a device."""
        return Texts(self.pieces.to(device), self.good.to(device))


def require_tokenizers() -> None:
    """Raise where the package is not there, before anything is fetched."""
    if importlib.util.find_spec("tokenizers") is None:
        raise DataError("texts need the package tokenizers; expected it to be there, by: pip install tokenizers")


def encode(vocabulary: bytes, reviews: Sequence[Review], length: int) -> Texts:
    """The first ``length`` word pieces of each text, with MiniLM's marks at begin and end."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(vocabulary)
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    pieces = [encoding.ids for encoding in tokenizer.encode_batch([review.text for review in reviews])]
    good = [int(review.good) for review in reviews]
    return Texts(torch.tensor(pieces, dtype=torch.int64).view(-1, length), torch.tensor(good, dtype=torch.int64))
