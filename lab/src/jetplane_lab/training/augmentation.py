"""Flips and crops of training images on their device, as a function of (seed, epoch, sample)."""

from __future__ import annotations

import torch
from torch import Tensor

from .batches import mixed

__all__ = ["flipped_and_cropped"]

_MARGIN = 4  # pixels
_STREAM = 1  # apart from the order of the epoch, which has the same seed
_CHUNK = 5_000  # images at a time: an index for each of their pixels is made


def flipped_and_cropped(images: Tensor, black: Tensor, seed: int, epoch: int, out: Tensor) -> None:
    """Write each image (C, H, W), with a margin of 4 black pixels cropped at random, half of them mirrored, to ``out``.

    ``black`` (C, 1, 1) is what a black pixel is. Nothing is computed with pixels, so all devices write the same.

    Example:
        >>> images = torch.ones(2, 1, 8, 8)
        >>> out = torch.empty_like(images)
        >>> flipped_and_cropped(images, torch.zeros(1, 1, 1), seed=0, epoch=3, out=out)
        >>> out.shape, set(out.unique().tolist()) <= {0.0, 1.0}
        (torch.Size([2, 1, 8, 8]), True)
    """
    generator = torch.Generator().manual_seed(mixed(mixed(seed, epoch), _STREAM))
    count, height, width = len(images), images.shape[2], images.shape[3]
    down, right = torch.randint(0, 2 * _MARGIN + 1, (2, count, 1), generator=generator, device="cpu") - _MARGIN
    mirrored = torch.randint(0, 2, (count, 1), generator=generator, device="cpu") > 0
    columns = torch.where(mirrored, torch.arange(width - 1, -1, -1), torch.arange(width)) + right
    rows = torch.arange(height) + down
    for start in range(0, count, _CHUNK):
        part = slice(start, start + _CHUNK)
        _gather(images[part], black, rows[part].to(images.device), columns[part].to(images.device), out[part])


def _gather(images: Tensor, black: Tensor, rows: Tensor, columns: Tensor, out: Tensor) -> None:
    """Pixels of the images (n, C, H, W) at ``rows`` (n, H) and ``columns`` (n, W), black outside."""
    height, width = images.shape[2:]
    inside = ((rows >= 0) & (rows < height)).unsqueeze(2) & ((columns >= 0) & (columns < width)).unsqueeze(1)
    place = rows.clamp(0, height - 1).unsqueeze(2) * width + columns.clamp(0, width - 1).unsqueeze(1)
    index = place.flatten(1).unsqueeze(1).expand(-1, images.shape[1], -1)
    out.copy_(torch.where(inside.unsqueeze(1), images.flatten(2).gather(2, index).view_as(images), black))
