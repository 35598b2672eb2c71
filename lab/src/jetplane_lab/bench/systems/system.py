"""What a system under measurement is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..problem import Derivatives, Problem

__all__ = ["Prepared", "Setting", "System", "as_plane", "ready", "torch_wait"]


class Setting(NamedTuple):
    """Where and on what a system would run."""

    model: str
    device: str
    fomoh: Path | None  # checkout of the authors' code


class Prepared(NamedTuple):
    """A system with its problem, ready to run."""

    call: Callable[[], Any]  # one evaluation; it may return before the device has finished
    read: Callable[[Any], Derivatives]  # what a call returned, as torch tensors
    wait: Callable[[Any], None]  # until the device has finished what a call returned
    planned: Callable[[], int | None] = lambda: None  # bytes that the compiler plans beside the arguments, if it says
    steps: int = 1  # that a call takes: the times are those of one of them


def ready(setting: Setting) -> str | None:
    """A system that runs wherever torch does."""
    return None


def as_plane(result: Any) -> Derivatives:
    """A result that is a plane as it stands."""
    return Derivatives(*result)


def torch_wait(device: str) -> Callable[[Any], None]:
    """How to wait for torch on a device."""

    def cuda(result: Any) -> None:
        torch.cuda.synchronize()

    return cuda if device.startswith("cuda") else lambda result: None


@dataclass(frozen=True)
class System:
    """A way to compute the plane (loss, slope, curvature) of a problem.

    ``kind`` is "ours", "peer", or "scale" for what is timed for scale alone and never ranked.
    """

    name: str
    about: str
    kind: str
    prepare: Callable[[Problem, Setting], Prepared]
    missing: Callable[[Setting], str | None] = ready  # why it cannot run there, or None
    library: str = "torch"
    compiled: bool = False
    accuracy: float = 1e-9  # relative, of its results in float64
    twin: str | None = None  # the eager system with the same code, where compiling twice would cost too much
