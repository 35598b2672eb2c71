"""Memory: what a step will need, whether it is there, and the peak that was reached."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jetplane import optim
from jetplane.directions import Mixed, RankOne
from jetplane.errors import JetplaneError

from ..config import FORWARD_GRADIENT, REVERSE, SECOND_ORDER, ZEROTH_ORDER, Config

__all__ = ["Demand", "Peak", "TooLarge", "demand", "free_memory", "kind", "require"]


class TooLarge(JetplaneError, MemoryError):
    """A run needs more memory than the device has."""


# -- before: an estimate ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demand:
    """What the memory of a step is made of, in bytes for a batch."""

    largest: int  # the largest activation
    curved: int  # the largest one that carries second rows
    all: int  # all activations together, which a backward pass keeps
    parameters: int
    method: str
    # of a search, whose directions move one layer each: the largest activation behind each layer, and the parameters
    layers: tuple[int, ...] = ()
    moving: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)

    def step(self, k: int) -> int:
        """An estimate of the memory that a step with K directions needs beyond parameters and data.

        An operation reads 1 + K rows of its input (the value and its tangents) and writes as many of its output.
        K (K + 1) / 2 second rows join them from the second layer with parameters on, and at the loss, where it takes
        the parts of a product beside its sum: three times the rows in all. Then there are the K directions. Measured
        on the CPU, the models here need between two thirds and one and a half times that.

        A forward gradient has K tangents of activations, and a gradient in place of directions; measured, 0.6 to 0.8
        of that. A search has rows of the directions that move a layer before the activation; measured, one and a half
        times that for K = 256 on the CNN.
        """
        reverse = self.all + self.parameters if self.method in REVERSE else 0
        if self.method in REVERSE and self.method not in SECOND_ORDER:
            return reverse + self.largest
        if self.method in ZEROTH_ORDER:  # a forward pass, and the row of a parameter
            return 2 * self.largest + self.parameters
        behind = _directions_behind(self.moving, k) if self.layers else None
        rows = 2 * (1 + k) * self.largest
        if behind is not None:
            rows = max(2 * (1 + count) * size for count, size in zip(behind, self.layers, strict=True))
        if self.method in FORWARD_GRADIENT:
            return rows + self.parameters
        if self.method in SECOND_ORDER:
            rows = max(rows, 3 * (1 + k + k * (k + 1) // 2) * self.curved)
        held = k if behind is None else k - behind[-1] + behind[0]  # of those that move one layer the factors alone
        return reverse + rows + held * self.parameters

    def largest_k(self, free: int, most: int) -> int:
        """The largest K up to ``most`` whose step fits, and 0 where none does."""
        return next((k for k in range(most, 0, -1) if self.step(k) <= free), 0)


def _directions_behind(moving: Sequence[Tensor], k: int) -> list[int] | None:
    """How many of a search's K directions move what each layer makes; None where each of them moves all layers."""
    family = optim.GaussNewtonSearch(moving, k=k).directions
    fresh = family.families[-1] if isinstance(family, Mixed) else family
    if not isinstance(fresh, RankOne):
        return None
    return [k - fresh.k + count for count in accumulate(fresh.shares(moving))]


@torch.no_grad()
def demand(model: nn.Module, batch: Tensor, config: Config) -> Demand:
    """Measured in a forward pass over one digit of ``batch``: activations are proportional to their number."""
    sizes: list[int] = []
    layers: list[int] = []  # of each activation, how many layers with parameters came before and with it

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        sizes.append(output.numel() * output.element_size())
        layers.append((layers[-1] if layers else 0) + bool(list(module.parameters())))

    hooks = [module.register_forward_hook(note) for module in model.modules() if not list(module.children())]
    try:
        model(batch[:1])
    finally:
        for hook in hooks:
            hook.remove()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    # the pairs of a softmax are a product's, with four to five numbers for each sample in all, whatever the classes
    loss = [min(sizes[-1], 3 * batch.element_size() // 2)]
    curved = [size for size, layer in zip(sizes, layers, strict=True) if layer > 1] or loss
    if config.method == "gauss-newton":
        curved = loss  # where its second order begins
    count = len(batch)
    # the pairs of a penalty are as long as the weights
    weights = max(p.numel() * p.element_size() for p in model.parameters()) if config.penalty else 0
    second = max(max(curved) * count, weights)
    whole = max(sizes) * count, second, sum(sizes) * count, parameters, config.method
    if config.method != "gauss-newton":
        return Demand(*whole)
    by_layer = [
        [size for size, layer in zip(sizes, layers, strict=True) if layer == n] for n in range(1, layers[-1] + 1)
    ]
    largest = tuple(max(some) * count for some in by_layer)
    return Demand(*whole, layers=largest, moving=tuple(model.parameters()))


def require(demands: list[tuple[Demand, int]], device: torch.device, free: int | None = None) -> None:
    """Raise unless steps of these demands, each with its K, fit into the memory of the device together."""
    free = free_memory(device) if free is None else free
    needed = sum(one.step(k) for one, k in demands)
    if needed <= free:
        return
    first, k = demands[0]
    runs = f"{len(demands)} runs together need" if len(demands) > 1 else "a step needs"
    message = f"{runs} about {_gigabytes(needed)} on {device}, which has {_gigabytes(free)} free"
    fits = first.largest_k(free // len(demands), k)
    name = "samples" if first.method in FORWARD_GRADIENT else "k"
    if (first.method in ("fgd", "fomoh-kd", "gauss-newton") or name == "samples") and fits:
        raise TooLarge(f"{name} is {k}: {message}; the largest {name} that fits is {fits}, or take a smaller batch.")
    raise TooLarge(f"{message}; expected a smaller batch.")


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    limits = [2**62]
    with contextlib.suppress(OSError):  # no /proc: nothing is known, and nothing refused
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(int(lines["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # "max": this container has no limit
        group = Path("/sys/fs/cgroup")
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(limits)


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"


# -- afterwards: the peak -----------------------------------------------------------------------------------------


def kind(device: torch.device) -> str:
    """What a peak on this device is a peak of."""
    return "cuda allocated" if device.type == "cuda" else "resident set"


class Peak:
    """The largest memory held since it was made or last cleared, above what was held when it was made.

    On CUDA what tensors take; on the CPU the resident set of the process, which counts whatever else it does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clear()
        self._before = self._now()

    def clear(self) -> None:
        """Forget how high it was: what comes next is not to be charged with what came before."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with contextlib.suppress(OSError):  # where the mark cannot be lowered, it stays
                Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        """Bytes."""
        return max(0, self._now() - self._before)

    def _now(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else _resident_peak()


def _resident_peak() -> int:
    with contextlib.suppress(OSError):
        for name, value in _status():
            if name == "VmHWM":
                return int(value.split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status() -> Iterator[tuple[str, str]]:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        yield name, value
