"""Where the bytes of a forward-only step are: its peak by kind, above parameters, optimizer state and batch.

    python benchmarks/forward_memory.py --models cnn residual --part 4
    python benchmarks/forward_memory.py --models mlp --compiled

The models are those of forward_steps.py, with a part of the batch. Counted are the storages of tensors as they come and
go, of an uncompiled step and of backprop, plain and with a checkpoint for each block. What holds the most at the peak
is told by the file that made it. With ``--compiled`` the allocator is asked, through torch's profiler: of the compiled
step, and of the uncompiled one for comparison. Runs on any CPU; nothing is timed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from forward_steps import ROWS, checkpointed, losses_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jetplane.optim import HorizonAdam

MIB = 2**20


class Live(TorchDispatchMode):
    """The bytes of the storages that were made inside and still live, by kind, and those at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self._known: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._now: Counter[str] = Counter()
        self.peak, self.kinds = 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id(one.untyped_storage()) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor) or isinstance(tensor, torch.nn.Parameter):
                continue
            storage = tensor.untyped_storage()
            if storage in self._known or id(storage) in given:
                continue
            kind, size = maker(), storage.nbytes()
            self._known[storage] = None
            self._now[kind] += size
            weakref.finalize(storage, self._gone, kind, size).atexit = False
            total = sum(self._now.values())
            if total > self.peak:
                self.peak, self.kinds = total, Counter(self._now)
        return out

    def _gone(self, kind: str, size: int) -> None:
        self._now[kind] -= size


def maker() -> str:
    """What in the library made a storage: the innermost of its frames that says most; else the program."""
    frame, engine = sys._getframe(2), None
    while frame is not None:
        path = frame.f_code.co_filename
        if "jetplane/" in path and "/benchmarks/" not in path:
            place = path.split("jetplane/", 1)[1].removesuffix(".py")
            if place.startswith(("gradients/noise", "gradients/plan", "gradients/adjoints", "optim/")):
                return f"{place} {frame.f_code.co_name}"
            if place.startswith("gradients/") and place.split("/")[-1] not in ("watch", "loss_program", "replay"):
                return engine or f"{place} {frame.f_code.co_name}"
            if engine is None and place.startswith(("ad/rules", "ad/kernels", "ad/algebra", "ad/engine")):
                engine = "tangents" if place.startswith(("ad/rules", "ad/kernels", "ad/algebra")) else None
            if place.startswith("gradients/program/loss_program"):
                return engine or "values"
        frame = frame.f_back
    return engine or "values"


def peak_of(call: Callable[[], object]) -> int:
    """By the allocator: the most bytes at any time of a call, above what was there."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    events = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]
    now = most = 0
    for one in sorted(events, key=lambda one: one.start_ns()):
        now += one.nbytes()
        most = max(most, now)
    return most


def show(name: str, live: Live, most: int) -> None:
    print(f"{name}: {live.peak / MIB:.1f} MiB", flush=True)
    for kind, size in live.kinds.most_common(most):
        if size > live.peak / 100:
            print(f"    {size / MIB:8.1f}  {kind}", flush=True)


def backprop(name: str, start: nn.Module, x: Tensor, y: Tensor, block: str) -> None:
    """Peaks of an uncompiled step, plain and with a checkpoint for each block."""
    for kind in ("backprop", "checkpointed"):
        model = copy.deepcopy(start)
        if kind == "checkpointed":
            checkpointed(model, block)
        losses, adam = losses_of(model), torch.optim.Adam(model.parameters(), 1e-4)
        for _ in range(2):
            adam.zero_grad(set_to_none=True)
            with Live() as live:
                losses(x, y).mean().backward()
                adam.step()
        show(f"{name}, {kind}", live, 0)


def horizon(name: str, start: nn.Module, x: Tensor, y: Tensor, most: int, options: dict[str, Any]) -> None:
    """Peaks of uncompiled steps, and what holds the most there."""
    model = copy.deepcopy(start)
    losses, opt = losses_of(model), HorizonAdam(model.parameters(), **options)
    for _ in range(opt.every):
        opt.step(losses, x, y)
    opt.zero_grad(set_to_none=True)
    for kind in ("a step that looks back", "a step"):
        with Live() as live:
            opt.step(losses, x, y)
        show(f"{name}, {kind}", live, most)
    opt.zero_grad(set_to_none=True)
    print(f"{name}, a step, by the allocator: {peak_of(lambda: opt.step(losses, x, y)) / MIB:.1f} MiB", flush=True)


def compiled(name: str, start: nn.Module, x: Tensor, y: Tensor, options: dict[str, Any]) -> None:
    """Peaks of compiled steps."""
    model = copy.deepcopy(start)
    losses, opt = losses_of(model), HorizonAdam(model.parameters(), compile=True, **options)
    for _ in range(opt.every + 1):
        opt.step(losses, x, y)
    for number in range(opt.every):
        kind = "compiled, looks back" if number == opt.every - 1 else "compiled"
        print(f"{name}, {kind}: {peak_of(lambda: opt.step(losses, x, y)) / MIB:.1f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=ROWS, default=["cnn", "mlp", "residual"])
    parser.add_argument("--part", type=int, default=4, help="one over so many of the batch")
    parser.add_argument("--memory", help="the budget of HorizonAdam")
    parser.add_argument("--chunk-size", type=int)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--most", type=int, default=12, help="kinds to show")
    given = parser.parse_args()
    for name in given.models:
        row = ROWS[name]
        torch.manual_seed(0)
        start = row.make()
        x, y = (part[0][: -(-part.shape[1] // given.part)].clone() for part in row.batch(1))
        print(f"{name}: {sum(p.nbytes for p in start.parameters()) / MIB:.1f} MiB of parameters", flush=True)
        options = {"samples": row.samples, "memory": given.memory, "chunk_size": given.chunk_size}
        backprop(name, start, x, y, row.block)
        horizon(name, start, x, y, given.most, options)
        if given.compiled:
            compiled(name, start, x, y, options)


if __name__ == "__main__":
    main()
