"""Images and labels as tensors: scaling for a model, and holding some out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Split", "black", "hold_out", "scaled"]

_MEAN, _STD = 0.1307, 0.3081  # of MNIST's training pixels; in use for the other grey ones as well
_COLOURS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10's, for red, green and blue


class Split(NamedTuple):
    """Images with their labels."""

    images: Tensor  # (N, 28, 28) or (N, 3, 32, 32), uint8
    labels: Tensor  # (N,), int64


def scaled(images: Tensor, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The images for a model, the same values on every device: (pixel / 255 - mean) / std.

    Grey ones become (N, 1, H, W) with 0.1307 and 0.3081, those of MNIST; coloured ones stay (N, 3, H, W), with mean and
    std of CIFAR-10 for each colour.

    >>> scaled(torch.tensor([[[0, 255]]], dtype=torch.uint8), "cpu")
    tensor([[[[-0.4242,  2.8215]]]])
    >>> scaled(torch.zeros(1, 3, 1, 1, dtype=torch.uint8), "cpu").flatten()
    tensor([-1.9895, -1.9803, -1.7068])
    """
    coloured = images.dim() == 4 and images.shape[1] == 3
    if images.dtype != torch.uint8 or not (coloured or images.dim() == 3):
        raise ValueError(
            f"the images have dtype {images.dtype} and shape {tuple(images.shape)}; expected torch.uint8, (N, 28, 28), "
            "or (N, 3, 32, 32)"
        )
    if not dtype.is_floating_point:
        raise ValueError(f"the dtype is {dtype}; expected a floating-point one")
    # On the CPU, because CUDA divides by a number as a product with its reciprocal, which differs in the last bit; and
    # in float32 at least, so that the shorter types are rounded once.
    wide = torch.promote_types(dtype, torch.float32)
    mean, std = (torch.tensor(numbers, dtype=wide).view(3, 1, 1) for numbers in _COLOURS) if coloured else (_MEAN, _STD)
    pixels = images.cpu().to(wide).div_(255).sub_(mean).div_(std)
    return (pixels if coloured else pixels.unsqueeze(1)).to(device=device, dtype=dtype)


def black(like: Tensor) -> Tensor:
    """What `scaled` makes of a black pixel, (C, 1, 1), for images (N, C, H, W) that it has made."""
    count = like.shape[1]
    pixel = torch.zeros(1, *((count,) if count == 3 else ()), 1, 1, dtype=torch.uint8)
    return scaled(pixel, like.device, like.dtype)[0]


def hold_out(split: Split, count: int = 5000, seed: int = 0) -> tuple[Split, Split]:
    """Two parts of ``split``: what remains, and ``count`` chosen at random, both in the order of ``split``.

    The choice is a function of the seed and of the size of ``split``; torch's global generator is not touched.

    >>> split = Split(torch.zeros(10, 28, 28, dtype=torch.uint8), torch.arange(10))
    >>> rest, held = hold_out(split, count=3)
    >>> sorted(rest.labels.tolist() + held.labels.tolist()) == list(range(10)), len(held.labels)
    (True, 3)
    """
    total = len(split.labels)
    if len(split.images) != total:
        raise ValueError(f"the split has {len(split.images)} images and {total} labels; expected as many")
    if not 0 < count < total:
        raise ValueError(f"count is {count}; expected a number from 1 to {total - 1}, of {total} images")
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed), device="cpu")
    held, rest = (part.sort().values.to(split.labels.device) for part in (order[:count], order[count:]))
    return Split(split.images[rest], split.labels[rest]), Split(split.images[held], split.labels[held])
