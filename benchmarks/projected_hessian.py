"""The projected Hessian of the paper's CNN: jetplane against nested torch.func, on one machine in one run.

    python benchmarks/projected_hessian.py --batch 256 --k 3 --out benchmarks/results/cpu.json

Every system is first compared with double backward in float64, then timed in a process of its own in float32.
Peak memory is that of torch's allocator above what was held before the call, exact and repeatable; on a CPU the
resident memory of the process is noted too, which depends on what the C library keeps of freed memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.nn import functional as F

import jetplane as jp
from jetplane.testing.oracle import double_backward

Params = dict[str, Tensor]
Plane = tuple[Tensor, Tensor, Tensor]  # loss (), slope (K,), curvature (K, K)


def cnn() -> nn.Module:
    """The paper's CNN, 431,080 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)),
    )


class Problem:
    """Model, batch and directions."""

    def __init__(self, batch: int, k: int, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        self.model = cnn().to(device, dtype)
        self.x = torch.randn(batch, 1, 28, 28, generator=generator).to(device, dtype)
        self.y = torch.randint(0, 10, (batch,), generator=generator).to(device)
        self.params = dict(self.model.named_parameters())
        self.directions = {
            name: torch.randn((k, *p.shape), generator=generator).to(device, dtype) for name, p in self.params.items()
        }
        self.k = k

    def loss(self) -> Tensor:
        return F.cross_entropy(self.model(self.x), self.y)

    def loss_of(self, params: Params) -> Tensor:
        return F.cross_entropy(functional_call(self.model, params, (self.x,)), self.y)


def forward(problem: Problem) -> Any:
    """One forward pass without derivatives, for scale."""
    with torch.no_grad():
        return problem.loss()


def jetplane(problem: Problem) -> Plane:
    """One pass with all pairs."""
    with jp.perturb(problem.params, problem.directions) as jets:
        loss = problem.loss()
    model = jets.quadratic(loss)
    return model.loss, model.slope, model.curvature


def _pair(problem: Problem, vi: Params, vj: Params) -> Plane:
    params = {name: p.detach() for name, p in problem.params.items()}

    def slope(p: Params) -> tuple[Tensor, Tensor]:
        return jvp(problem.loss_of, (p,), (vi,))

    (loss, first), (_, second) = jvp(slope, (params,), (vj,))
    return loss, first, second


def func_loop(problem: Problem) -> Plane:
    """torch.func.jvp of jvp, one pair after the other."""
    v = problem.directions
    slope, curvature = problem.x.new_zeros(problem.k), problem.x.new_zeros(problem.k, problem.k)
    loss = problem.x.new_zeros(())
    with torch.no_grad():
        for i in range(problem.k):
            for j in range(i, problem.k):
                row = {n: d[i] for n, d in v.items()}, {n: d[j] for n, d in v.items()}
                loss, first, second = _pair(problem, *row)
                slope[i] = first
                curvature[i, j] = curvature[j, i] = second
    return loss, slope, curvature


def func_vmap_pairs(problem: Problem) -> Plane:
    """torch.func: vmap over the K(K+1)/2 pairs of jvp of jvp."""
    i, j = torch.triu_indices(problem.k, problem.k)
    v = problem.directions
    with torch.no_grad():
        loss, first, second = vmap(lambda a, b: _pair(problem, a, b))(
            {n: d[i] for n, d in v.items()}, {n: d[j] for n, d in v.items()}
        )
    curvature = second.new_zeros(problem.k, problem.k)
    curvature[i, j] = second
    curvature[j, i] = second
    return loss[0], first[i == j], curvature


def func_vmap_vmap(problem: Problem) -> Plane:
    """torch.func: vmap of vmap of jvp of jvp, all K x K entries."""
    v = problem.directions
    with torch.no_grad():
        loss, first, second = vmap(lambda a: vmap(lambda b: _pair(problem, a, b))(v))(v)
    return loss[0, 0], first[:, 0], second


SYSTEMS: dict[str, Callable[[Problem], Any]] = {
    "forward": forward,
    "jetplane": jetplane,
    "torch.func loop": func_loop,
    "torch.func vmap pairs": func_vmap_pairs,
    "torch.func vmap vmap": func_vmap_vmap,
}


def check(system: Callable[[Problem], Plane], k: int, device: str) -> float:
    """The system's largest relative error against double backward, in float64 on a small batch."""
    problem = Problem(8, k, torch.float64, device)
    expected = double_backward(problem.loss, list(problem.params.values()), list(problem.directions.values()))
    numbers = (expected.loss, expected.slope, expected.curvature)
    actual = system(problem)
    return max(float((a.to(b) - b).abs().max() / b.abs().max()) for a, b in zip(actual, numbers, strict=True))


def measure(name: str, batch: int, k: int, repeats: int, device: str) -> dict[str, Any]:
    """Check and time one system in this process."""
    system = SYSTEMS[name]
    error = 0.0 if name == "forward" else check(system, k, device)
    if error > 1e-9:
        raise SystemExit(f"{name} differs from double backward by {error:.1e}; expected at most 1e-9.")
    problem = Problem(batch, k, torch.float32, device)
    cuda = device.startswith("cuda")
    forward(problem)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else _reset_peak()
    times = []
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        system(problem)
        if cuda:
            torch.cuda.synchronize()
        if repeat:  # the first one warms up
            times.append(1e3 * (time.perf_counter() - start))
    times.sort()
    if cuda:
        memory = {"peak_mib": round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)}
    else:
        resident = round((_resident_peak() - before) / 2**20, 1)
        memory = {"peak_mib": round(_allocated_peak(lambda: system(problem)) / 2**20, 1), "resident_mib": resident}
    return {
        "system": name,
        "median_ms": round(times[len(times) // 2], 3),
        "min_ms": round(times[0], 3),
        "max_ms": round(times[-1], 3),
        **memory,
        "error": error,
    }


def _allocated_peak(call: Callable[[], Any]) -> int:
    """The most bytes that torch's CPU allocator had handed out at one time during the call, beyond those before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    held = accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(held)


def _reset_peak() -> int:
    """Start counting the resident peak anew (Linux), and return it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _resident_peak()


def _resident_peak() -> int:
    """The peak of resident memory, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def environment(device: str) -> dict[str, Any]:
    """Where and with what the numbers were measured."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    commit = found.stdout.strip() if found.returncode == 0 else "unknown"
    return {
        "torch": torch.__version__,
        "jetplane": jp.__version__,
        "commit": commit,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine() + " CPU",
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Measure every system in its own process and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--one", choices=list(SYSTEMS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        print(json.dumps(measure(options.one, options.batch, options.k, options.repeats, options.device)))
        return
    rows = []
    for name in options.systems:
        arguments = [f"--{key}={getattr(options, key)}" for key in ("batch", "k", "repeats", "device", "threads")]
        run = subprocess.run([sys.executable, __file__, *arguments, f"--one={name}"], capture_output=True, text=True)
        if run.returncode:
            print(f"{name}: failed: {run.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            continue
        rows.append(json.loads(run.stdout.splitlines()[-1]))
        row = rows[-1]
        spread = f"[{row['min_ms']:.1f}, {row['max_ms']:.1f}]"
        print(f"{name:24} {row['median_ms']:9.1f} ms  {spread}  {row['peak_mib']:8.1f} MiB")
    settings = {"batch": options.batch, "k": options.k, "dtype": "float32", "model": "paper CNN, 431,080 parameters"}
    result = {"environment": environment(options.device), "settings": settings, "results": rows}
    if options.out:
        with tempfile.NamedTemporaryFile("w", dir=options.out.parent, delete=False) as file:
            json.dump(result, file, indent=1)
        os.replace(file.name, options.out)


if __name__ == "__main__":
    main()
