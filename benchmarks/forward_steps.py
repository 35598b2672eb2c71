"""Steps of forward-only training as a user takes them: HorizonAdam(compile=True), beside a forward pass and backprop.

    python benchmarks/forward_steps.py --device cuda --out benchmarks/results/forward_steps_h200.json

For each model: the median time of a compiled forward pass without autograd, of a compiled backprop step (Adam) and of a
compiled step of HorizonAdam, all replayed as CUDA graphs where there is CUDA; the passes that a step counts (FLOPs of
its products over those of a forward pass, of the uncompiled step); how far the first compiled steps are from the
uncompiled ones; and the peak memory of a step above parameters and optimizer state, with that of backprop and of
backprop with a checkpoint for each block. A model whose packages are missing is skipped with a message.

Compiling takes most of the time, so each model has a process: all compile at once, wait for each other, and then take
their times one by one, with the device and the host for themselves. ``--in-turn`` does one model after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from jetplane.compiler.replayed import Replayed
from jetplane.optim import HorizonAdam
from jetplane_lab.bench.machine import environment
from jetplane_lab.cost import forward_equivalents
from jetplane_lab.methods.backprop import Backprop


class Residual(nn.Module):
    """A small residual network with group norm."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU()),
                *(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width)),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(self.stem(x).relu(), 2)
        for block in self.blocks:
            h = (h + block(h)).relu()
        return self.head(h.mean((2, 3)))


def cnn() -> nn.Module:
    """Three convolutions and two linear layers, for images of 32 x 32."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 256), nn.ReLU(), nn.Linear(256, 10))


def mlp() -> nn.Module:
    """784-512-512-10 with layer norms."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in ((784, 512), (512, 512)):
        layers += [nn.Linear(before, after), nn.LayerNorm(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def bert(layers: int = 6) -> nn.Module:
    """A BERT of MiniLM's size, from its config."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=384, num_hidden_layers=layers, num_attention_heads=12, intermediate_size=1536, num_labels=2
    )

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = BertForSequenceClassification(config)

        def forward(self, tokens: Tensor) -> Tensor:
            # places and kinds for each sample: (1, T) of them would couple the samples
            places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            return self.model(tokens, position_ids=places, token_type_ids=torch.zeros_like(tokens)).logits

    return Logits()


class Row(NamedTuple):
    """A model, a batch, and what a checkpoint is put around."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]  # so many of them, stacked
    block: str  # the class of the modules that a checkpoint is put around
    samples: int


def images(size: int, channels: int, width: int, batch: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda count: (torch.randn(count, batch, channels, width, width), torch.randint(size, (count, batch)))


def words(batch: int, length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda count: (torch.randint(30_000, (count, batch, length)), torch.randint(2, (count, batch)))


ROWS = {
    "cnn": Row(cnn, images(10, 3, 32, 256), "Conv2d", 8),
    "mlp": Row(mlp, images(10, 1, 28, 512), "Linear", 8),
    "residual": Row(Residual, images(10, 1, 28, 512), "Sequential", 8),
    "bert": Row(bert, words(32, 64), "BertLayer", 4),
}


def losses_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def losses(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    return losses


def median_ms(call: Callable[[], object], steps: int, repeats: int = 7) -> float:
    """Of one step, over calls that take several."""
    found = []
    for _ in range(repeats):
        synchronise()
        start = time.perf_counter()
        call()
        synchronise()
        found.append((time.perf_counter() - start) / steps)
    return 1e3 * statistics.median(found)


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak(call: Callable[[], object]) -> int | None:
    """Bytes above what is held before; None where the device does not tell."""
    if not torch.cuda.is_available():
        return None
    gc.collect()
    synchronise()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    synchronise()
    return torch.cuda.max_memory_allocated() - before


def checkpointed(model: nn.Module, kind: str) -> None:
    """A checkpoint around each module of a class."""
    for module in model.modules():
        if type(module).__name__ == kind:
            inner = module.forward
            module.forward = lambda *a, inner=inner, **k: checkpoint(inner, *a, use_reentrant=False, **k)


Timers = dict[str, Callable[[], float]]  # by what they find, in milliseconds


def forward_timer(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], float]:
    """That of a compiled forward pass, on each entry of the batches."""
    compiled = torch.compile(lambda x, y: losses_of(model)(x, y).mean())

    def run(batch: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [compiled(*batch)]

    if x.is_cuda:
        replayed = Replayed(run)
        call = lambda: replayed([x[0], y[0]], {0: x, 1: y}, len(x))  # noqa: E731
    else:
        call = lambda: [run([a, b]) for a, b in zip(x, y, strict=True)]  # noqa: E731
    for _ in range(3):
        call()
    return lambda: median_ms(call, len(x))


def backprop_row(row: Row, start: nn.Module, x: Tensor, y: Tensor, timers: Timers) -> dict[str, Any]:
    """Time of a compiled step, and peaks of an uncompiled one, plain and with checkpoints."""
    found: dict[str, Any] = {}
    model = copy.deepcopy(start)
    losses = losses_of(model)
    opt = Backprop(torch.optim.Adam(model.parameters(), 1e-4, capturable=x.is_cuda, fused=x.is_cuda), compile=True)
    mean = lambda x, y, losses=losses: losses(x, y).mean()  # noqa: E731
    for _ in range(2):
        opt.steps(mean, x, y)
    timers["backprop_ms"] = lambda: median_ms(lambda: opt.steps(mean, x, y), len(x))
    for name in ("backprop", "checkpointed"):
        model = copy.deepcopy(start)
        if name == "checkpointed":
            checkpointed(model, row.block)
        losses = losses_of(model)
        adam = torch.optim.Adam(model.parameters(), 1e-4)
        for _ in range(2):
            losses(x[0], y[0]).mean().backward()
            adam.step()
            adam.zero_grad(set_to_none=True)

        def step(losses: Any = losses, adam: Any = adam) -> None:
            losses(x[0], y[0]).mean().backward()
            adam.step()

        found[f"{name}_peak"] = peak(step)
    return found


def horizon_row(
    row: Row, start: nn.Module, x: Tensor, y: Tensor, timers: Timers, compile: bool, profile: bool = False
) -> dict[str, Any]:
    """Time and peak of compiled steps, beside the uncompiled ones."""
    found: dict[str, Any] = {"samples": row.samples}
    eager, fast = copy.deepcopy(start), copy.deepcopy(start)
    one = HorizonAdam(eager.parameters(), samples=row.samples)
    began = time.perf_counter()
    first = [float(one.step(losses_of(eager), x[0], y[0]))]
    found["first_step_s"] = time.perf_counter() - began
    first += [float(one.step(losses_of(eager), x[n], y[n])) for n in range(1, len(x))]
    steps = iter(range(10**6))
    found["passes"] = statistics.mean(
        forward_equivalents(lambda: one.step(losses_of(eager), x[next(steps) % len(x)], y[0]), eager, x[0])
        for _ in range(one.every)
    )
    timers["eager_ms"] = lambda: median_ms(
        lambda: [one.step(losses_of(eager), x[0], y[0]) for _ in range(one.every)], one.every, 3
    )
    found["eager_peak"] = peak(lambda: [one.step(losses_of(eager), x[0], y[0]) for _ in range(one.every)])
    if not compile:
        return found
    losses, opt = losses_of(fast), HorizonAdam(fast.parameters(), samples=row.samples, compile=True)
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        second = opt.steps(losses, x, y).loss.tolist()
    found["compile_s"] = time.perf_counter() - began
    found["warnings"] = sorted({str(one.message)[:300] for one in said if "run as it is" in str(one.message)})
    found["losses_apart"] = max(abs(a - b) for a, b in zip(first, second, strict=True))
    found["compiled_peak"] = peak(lambda: opt.steps(losses, x[:1], y[:1]))
    for _ in range(3):
        opt.steps(losses, x, y)
    timers["compiled_ms"] = lambda: median_ms(lambda: opt.steps(losses, x, y), len(x))
    if profile:
        show_kernels(lambda: opt.steps(losses, x, y), len(x))
    return found


def show_kernels(call: Callable[[], object], steps: int) -> None:
    """The kernels that took longest, microseconds a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        synchronise()
    kernels = sorted(seen.key_averages(), key=lambda one: -one.self_device_time_total)
    print(f"all kernels: {sum(one.self_device_time_total for one in kernels) / steps:.0f} us a step", flush=True)
    for one in kernels[:30]:
        print(f"{one.self_device_time_total / steps:9.1f} us {one.count / steps:7.1f} x  {one.key[:90]}", flush=True)


def measure(name: str, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """All numbers of a model; its times once every other process has nothing left to compile."""
    row, timers = ROWS[name], Timers()
    torch.manual_seed(0)
    with all_ready(options.meeting, name, options.patience):
        try:
            start = row.make().to(options.device)
        except ImportError as error:
            say(f"{name} is skipped: {error}")
            return {}
        x, y = (part.to(options.device) for part in row.batch(options.steps))
        timers["forward_ms"] = forward_timer(start, x, y)
        found: dict[str, Any] = {}
        for part in (backprop_row, lambda *a: horizon_row(*a, not options.eager, options.profile)):
            try:
                found |= part(row, start, x, y, timers)
            except Exception as error:  # the other rows are worth having
                found["failed"] = f"{type(error).__name__}: {error}"[:1000]
        say(f"{name} has compiled: {json.dumps(found)}")
    with alone(options.meeting):
        found |= {key: timer() for key, timer in timers.items()}
    say(f"{name} {json.dumps(found)}")
    return found


@contextlib.contextmanager
def all_ready(meeting: Path | None, name: str, patience: float) -> Iterator[None]:
    """Say that what is inside is done, and wait until all others have said so, so many seconds at most."""
    until = time.monotonic() + patience
    try:
        yield
    finally:
        if meeting is not None:
            (meeting / f"{name}.ready").touch()
            others = [meeting / f"{path.stem}.ready" for path in meeting.glob("*.begun")]
            while time.monotonic() < until and not all(path.exists() for path in others):
                time.sleep(0.1)


@contextlib.contextmanager
def alone(meeting: Path | None) -> Iterator[None]:
    """One process at a time."""
    if meeting is None:
        yield
        return
    with open(meeting / "alone", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def at_once(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The numbers of all models, each from a process of its own."""
    with tempfile.TemporaryDirectory(prefix="forward-steps-") as folder:
        meeting, running = Path(folder), {}
        for name in options.models:
            (meeting / f"{name}.begun").touch()
        for name in options.models:
            command = [sys.executable, __file__, "--models", name, "--device", options.device]
            command += ["--steps", str(options.steps), "--out", str(meeting / f"{name}.json")]
            command += ["--meeting", folder, "--patience", str(options.patience)]
            command += ["--eager"] if options.eager else []
            command += ["--profile"] if options.profile else []
            running[name] = subprocess.Popen(command)
        for name, process in running.items():
            if process.wait():  # it may have ended before it said so
                (meeting / f"{name}.ready").touch()
        files = {name: meeting / f"{name}.json" for name in options.models}
        return {
            name: json.loads(path.read_text())["rows"].get(name, {}) for name, path in files.items() if path.exists()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--steps", type=int, default=20, help="steps to a call; HorizonAdam looks back every four")
    parser.add_argument("--eager", action="store_true", help="without the compiled steps")
    parser.add_argument("--profile", action="store_true", help="print the kernels of compiled steps that took longest")
    parser.add_argument("--in-turn", action="store_true", help="one model after the other")
    parser.add_argument("--patience", type=float, default=1800, help="seconds to wait for other models to be compiled")
    parser.add_argument("--meeting", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    result: dict[str, Any] = {"environment": environment(options.device, torch.get_num_threads()), "rows": {}}

    def write(rows: dict[str, Any]) -> None:
        result["rows"] |= rows
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")

    if options.meeting is None and not options.in_turn and len(options.models) > 1:
        write(at_once(options))
        return
    for name in options.models:
        write({name: measure(name, options, lambda line: print(line, flush=True))})


if __name__ == "__main__":
    main()
