"""Two commits of this repository in one run: what became slower. ``jetplane bench --compare A B``.

Each round starts a process of each tree, the older one first in every second round, and each process times every job:
an eager step on the Rosenbrock function, a plane of the paper's CNN, eager and compiled, and a forward-gradient step
with Adam on the CNN. The ratio of a job is the median over the rounds of new over old, of the fastest call of each.
What the processes run is this file, with the package of either tree: it imports jetplane alone, inside its functions.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["TREE", "compare", "slower", "trees_of"]

TREE = "."  # in place of a commit: the files as they are


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


@contextlib.contextmanager
def trees_of(repository: Path, commits: tuple[str, str]) -> Iterator[dict[str, Path]]:
    """The packages of two commits, checked out beside each other in a folder that goes away."""
    with tempfile.TemporaryDirectory() as folder:
        made: list[Path] = []
        try:
            trees = {}
            for which, commit in zip(("old", "new"), commits, strict=True):
                if commit == TREE:
                    trees[which] = repository / "src"
                    continue
                place = Path(folder) / which
                _git(repository, "worktree", "add", "--quiet", "--detach", str(place), _known(repository, commit))
                made.append(place)
                trees[which] = place / "src"
            for tree in trees.values():
                if not (tree / "jetplane" / "__init__.py").exists():
                    raise ValueError(f"{tree} holds no package jetplane; expected a commit of this repository")
            yield trees
        finally:
            for place in made:
                _git(repository, "worktree", "remove", "--force", str(place))


def compare(
    trees: dict[str, Path], rounds: int, seconds: float, tell: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """The times of every job in both trees, and their ratio."""
    found: list[dict[str, Any]] = []
    for number in range(rounds):
        order = ["old", "new"] if number % 2 == 0 else ["new", "old"]
        found.append({which: _run(trees[which], seconds) for which in order})
        tell(f"round {number + 1} of {rounds}")
    rows = {}
    for name in found[0]["old"]["found"]:
        times = {which: [one[which]["found"][name] for one in found] for which in trees}
        ratio = statistics.median(new / old for old, new in zip(times["old"], times["new"], strict=True))
        rows[name] = {"old_seconds": min(times["old"]), "new_seconds": min(times["new"]), "ratio": ratio}
    return {
        "torch": found[0]["old"]["torch"],
        "machine": platform.processor() or platform.machine(),
        "threads": 1,
        "python": platform.python_version(),
        "rows": rows,
        "rounds": found,
    }


def slower(found: dict[str, Any], limit: float) -> list[str]:
    """The jobs whose ratio is above the limit."""
    return [name for name, row in found["rows"].items() if row["ratio"] > limit]


def _run(tree: Path, seconds: float) -> dict[str, Any]:
    code = f"import runpy; runpy.run_path({str(Path(__file__).resolve())!r})['measure']({seconds})"
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, check=True
    )
    measured: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return measured


def _known(repository: Path, commit: str) -> str:
    """The full name of a commit."""
    asked = ["git", "-C", str(repository), "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    if found.returncode:
        raise ValueError(f"--compare has {commit}, which is no commit here; expected a name that git knows, or {TREE}")
    return found.stdout.strip()


def _git(repository: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(repository), *words], check=True, capture_output=True)
