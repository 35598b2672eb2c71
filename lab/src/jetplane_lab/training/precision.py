"""How CUDA computes, for the time of training: with or without TF32, and the same way every time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["arithmetic"]


@contextlib.contextmanager
def arithmetic(tf32: bool) -> Iterator[None]:
    """Allow products of float32 numbers with 10 bits of mantissa, or not; the settings before are restored.

    cuDNN's algorithms are the deterministic ones, for a run that is resumed must be the run that was not stopped.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before, matmul.allow_tf32 = matmul.allow_tf32, tf32
    try:
        with cudnn.flags(enabled=cudnn.enabled, benchmark=cudnn.benchmark, deterministic=True, allow_tf32=tf32):
            yield
    finally:
        matmul.allow_tf32 = before
