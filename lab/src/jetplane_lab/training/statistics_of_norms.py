"""Batch norms evaluated with other parameters than those of training: their statistics are taken anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

__all__ = ["taken_anew"]


@contextlib.contextmanager
def taken_anew(model: nn.Module, images: Iterable[Tensor]) -> Iterator[None]:
    """Statistics of the parameters that are in the model, from passes over ``images``; those of training afterwards."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    kept = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
    if norms:
        with torch.no_grad():
            update_bn(images, model)
    try:
        yield
    finally:
        for buffer, before in kept:
            buffer.copy_(before)
