"""What a step of a contestant costs: forward passes, bytes, and milliseconds with the device for itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..cost import forward_equivalents
from ..live_bytes import held_tensors, step_bytes
from ..methods import Method, scheduled
from ..training.memory import Peak
from ..training.precision import arithmetic
from .contestants import CONTESTANTS
from .entry import Data, Entry, build, losses_of

__all__ = ["held_by", "passes_of", "peak_of", "seconds_of"]

_CALLS = 5


def passes_of(entry: Entry, data: Data) -> float:
    """The forward passes of a batch that a step has, counted on a copy that is not compiled; without a first step's."""
    contestant, model = CONTESTANTS[entry.method], build(entry, data)
    contestant.prepare(model)
    method = contestant.make(model, entry.rate, entry.seed, False)
    losses = losses_of(model, data.train, not contestant.per_sample)
    index = torch.arange(entry.settings.batch, device=entry.settings.device)

    def step() -> None:
        with contestant.guarded():
            method.step(losses, index)

    step()
    counted = range(getattr(scheduled(method), "every", 1))  # HorizonAdam measures in one of so many
    with arithmetic(entry.settings.tf32):
        return statistics.mean(forward_equivalents(step, model, data.train.pieces[index]) for _ in counted)


def held_by(model: nn.Module, method: Method) -> int:
    """Bytes of parameters, gradients, buffers, and what the optimizer keeps, each storage once."""
    held = [one.untyped_storage() for one in held_tensors(model, method.state_dict)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def peak_of(step: Callable[[], object], model: nn.Module, method: Method, above: Peak) -> tuple[int, str]:
    """Bytes at most during a step with all that is held meanwhile, and what they are a peak of.

    On CUDA what the allocator gave since ``above`` was made, before the model; on the CPU the bytes of live tensors,
    for the resident set of the process is also that of the runs before.
    """
    if next(model.parameters()).is_cuda:
        above.clear()
        step()
        torch.cuda.synchronize()
        return above.read(), "cuda allocated"
    return step_bytes(step, model, method.state_dict), "live tensors"


def seconds_of(steps: Callable[[Tensor], Any], batches: Tensor, count: int) -> float:
    """The median over calls of the time of a step, after a call that is not counted."""
    part = batches[: max(1, count // _CALLS)]
    times = []
    for number in range(1 + min(count, _CALLS)):
        began = time.perf_counter()
        steps(part)
        if part.is_cuda:
            torch.cuda.synchronize(part.device)
        if number:
            times.append((time.perf_counter() - began) / len(part))
    return statistics.median(times)
