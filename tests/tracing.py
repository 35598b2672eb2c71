"""Tracing without the compiler, for tests of compiled steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx


def trace_only(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Callable[..., Any], set[int]]:
    """What ``_torch.compiled`` does, less the compiler."""
    written: set[int] = set()

    def watched(*tensors: Tensor) -> Any:
        before = [tensor._version for tensor in tensors]
        out = function(list(tensors))
        written.update(n for n, tensor in enumerate(tensors) if tensor._version != before[n])
        return out

    with torch.no_grad():
        run = make_fx(watched, tracing_mode="fake")(*(tensor.detach() for tensor in inputs))

    def call(tensors: Sequence[Tensor]) -> Any:
        with torch.no_grad():
            return run(*(tensor.detach() for tensor in tensors))

    return call, written
