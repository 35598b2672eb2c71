"""Two trees of the library beside each other in one run, to show that a change of structure cost no time.

    git worktree add ../old <commit>
    python benchmarks/old_and_new.py ../old/src src --out runs/old_and_new.json

Each round starts a process of each tree, the older one first in every second round, and each process times every job:
an eager step on the Rosenbrock function, a plane of the paper's CNN, eager and compiled, and a forward-gradient step
with Adam on the CNN. The ratio of a job is the median over the rounds of new over old, of the fastest call of each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def jobs() -> dict[str, tuple[Callable[[], Any], int]]:
    """What is timed, and how many calls make one measurement."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    import jetplane as jp

    torch.manual_seed(0)
    x = torch.full((10,), 1.2, dtype=torch.float64, requires_grad=True)
    search = jp.optim.FoMoHKD([x], lr=1e-3, k=2, patience=None)

    def rosenbrock() -> Tensor:
        return ((1 - x[:-1]) ** 2 + 100 * (x[1:] - x[:-1] ** 2) ** 2).sum()

    layers = [nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10))
    images, labels = torch.randn(32, 1, 28, 28), torch.arange(32) % 10
    weights = {name: p.detach() for name, p in model.named_parameters()}
    along = {name: torch.randn(3, *p.shape) for name, p in weights.items()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (images,)), labels)

    compiled = jp.compile(jp.quadratic)
    estimate = jp.ForwardGradient(model.parameters(), samples=2)
    adam = torch.optim.Adam(model.parameters(), lr=1e-4)

    def forward_gradient() -> None:
        adam.zero_grad()
        estimate(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), images, labels)
        adam.step()

    return {
        "eager Rosenbrock step": (lambda: search.step(rosenbrock), 100),
        "eager plane of the CNN": (lambda: jp.quadratic(loss, (weights,), (along,)), 1),
        "compiled plane of the CNN": (lambda: compiled(loss, (weights,), (along,)), 1),
        "forward-gradient step of the CNN": (forward_gradient, 1),
    }


def measure(seconds: float) -> None:
    """In a process of its own: the fastest call of each job, printed as JSON."""
    import torch

    torch.set_num_threads(1)
    found = {}
    for name, (call, calls) in jobs().items():
        for _ in range(5):
            call()
        best, end = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            for _ in range(calls):
                call()
            best = min(best, (time.perf_counter() - start) / calls)
        found[name] = best
    print(json.dumps({"torch": torch.__version__, "found": found}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the folder that holds the older package")
    parser.add_argument("new", type=Path, help="and the newer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each job in each process (4)")
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers")
    arguments = parser.parse_args()
    trees = {"old": arguments.old.resolve(), "new": arguments.new.resolve()}
    for tree in trees.values():
        if not (tree / "jetplane" / "__init__.py").exists():
            parser.error(f"{tree} holds no package jetplane; expected the src folder of a tree.")
    rounds: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        order = ["old", "new"] if number % 2 == 0 else ["new", "old"]
        rounds.append({which: _run(trees[which], arguments.seconds) for which in order})
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    rows = {}
    for name in rounds[0]["old"]["found"]:
        times = {which: [one[which]["found"][name] for one in rounds] for which in trees}
        ratio = statistics.median(new / old for old, new in zip(times["old"], times["new"], strict=True))
        rows[name] = {"old_seconds": min(times["old"]), "new_seconds": min(times["new"]), "ratio": ratio}
        print(f"{name}: {1e3 * min(times['old']):.3f} ms, now {1e3 * min(times['new']):.3f} ms, ratio {ratio:.3f}")
    if arguments.out is not None:
        commits = {which: _commit(tree) for which, tree in trees.items()}
        kept = {
            "commits": commits,
            "torch": rounds[0]["old"]["torch"],
            "machine": platform.processor() or platform.machine(),
        }
        kept |= {"threads": 1, "python": platform.python_version(), "rows": rows, "rounds": rounds}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        part = arguments.out.with_suffix(".part")
        part.write_text(json.dumps(kept, indent=1) + "\n")
        os.replace(part, arguments.out)


def _run(tree: Path, seconds: float) -> dict[str, Any]:
    code = f"import runpy; runpy.run_path({str(Path(__file__).resolve())!r})['measure']({seconds})"
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, check=True
    )
    return json.loads(ran.stdout.splitlines()[-1])


def _commit(tree: Path) -> str:
    return subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()


if __name__ == "__main__":
    main()
