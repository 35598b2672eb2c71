"""Normal numbers as one operation of a traced program: a kernel on CUDA, the counter's own arithmetic elsewhere."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from . import counter, scalar

__all__ = ["fast", "normal"]

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def fast(device: torch.device) -> bool:
    """Whether there is a kernel for this device."""
    return device.type == "cuda" and _HAS_TRITON


def normal(stream: counter.Stream, start: int, stop: int, size: int, *, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Standard normal numbers (stop - start, size) on the device of ``like``; equal to the counter's, bit by bit."""
    words = [
        word
        if isinstance(word, Tensor)
        else torch.full((), counter.signed(word), dtype=torch.int64, device=like.device)
        for word in (stream.seed, stream.step)
    ]
    place = stream.position | stream.sample << 16
    return torch.ops.jetplane.normal(*words, place, start, stop, size, dtype)


# Not a custom_op, whose wrappers for autograd and aliases take longer than a few numbers do: it has no derivative.
_LIBRARY = torch.library.Library("jetplane", "FRAGMENT")
_LIBRARY.define(
    "normal(Tensor seed, Tensor step, SymInt place, SymInt start, SymInt stop, SymInt size, ScalarType dtype) "
    "-> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _normal(seed: Tensor, step: Tensor, place: int, start: int, stop: int, size: int, dtype: torch.dtype) -> Tensor:
    if fast(step.device):
        from . import kernels

        return kernels.normal(seed, step, place, start, stop, size, dtype)
    stream = counter.Stream(int(seed) % (1 << 64), int(step), place >> 16, place & 0xFFFF)
    if scalar.pays(stop - start, size, dtype, step.device):
        return scalar.normal(stream, start, stop, size, dtype)
    return counter.normal(stream, start, stop, size, dtype=dtype, device=step.device).contiguous()


_LIBRARY.impl("normal", _normal, "CompositeExplicitAutograd")


@torch.library.register_fake("jetplane::normal", lib=_LIBRARY)
def _(seed: Tensor, step: Tensor, place: int, start: int, stop: int, size: int, dtype: torch.dtype) -> Tensor:
    return step.new_empty((stop - start, size), dtype=dtype)
