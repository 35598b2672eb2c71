"""Fingerprints of what the library computes, so that a change of structure can show that no number has changed.

    python benchmarks/fingerprints.py record before.json     # in the old tree
    python benchmarks/fingerprints.py compare before.json    # in the new one, on the same machine

Hashed bit by bit: planes over the cases of the tests, parameters after 20 steps of every named optimizer, forward
gradients of the programs of their exactness tests, and a short training run with its resumed twin. Parameters after
compiled steps are kept as numbers and compared to 1e-12 in float64, for a compiler may fuse differently.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jetplane as jp
from jetplane import directions, solvers
from jetplane.optim import FGD, FoMoH, FoMoHBP, FoMoHKD, GaussNewtonSearch, HorizonAdam, HyperplaneSearch, Newton

TREE = Path(__file__).resolve().parents[1]
STEPS = 20
CLOSE = 1e-12
F64 = torch.float64

Found = Iterator[tuple[str, Any]]  # a name, and a hash or a list of numbers


def digest(*tensors: Tensor | None) -> str:
    """A hash of the tensors' shapes, dtypes and bits."""
    made = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            made.update(b"none")
            continue
        tensor = tensor.detach().cpu().contiguous()
        made.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        made.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()[:16]


def helper(*names: str) -> Any:
    """A module of the tests, wherever it stands, by the first of its names that is there."""
    found = [p for name in names for folder in ("tests", "lab") for p in (TREE / folder).rglob(f"{name}.py")]
    path = next(p for p in found if ".venv" not in p.parts)
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


# -- planes -----------------------------------------------------------------------------------------------------------


def planes() -> Found:
    """Loss, slope and curvature of every case, exact, Gauss-Newton and first order."""
    cases = helper("cases")
    for case in [*cases.MODELS, *cases.LAYERS]:
        for curvature in ("exact", "ggn", "none"):
            leaves, program = case.build()
            torch.manual_seed(1)
            along = cases.along(list(leaves.values()), 3)
            try:
                pairs = {"exact": "all", "ggn": "all", "none": "none"}[curvature]
                how = {"curvature": "ggn"} if curvature == "ggn" else {}
                with jp.perturb(leaves, dict(zip(leaves, along, strict=True)), pairs=pairs, **how) as jets:
                    loss = program()
                jet = jets.of(loss)
                yield f"plane/{case.name}/{curvature}", digest(jet.primal, jet.tangent, jet.second)
            except (jp.JetplaneError, ValueError) as error:
                yield f"plane/{case.name}/{curvature}", type(error).__name__
    for name, loss, _ in cases.LOSSES:
        torch.manual_seed(2)
        x = torch.randn(4, 3, dtype=F64)
        yield f"loss/{name}", _quadratic(loss, x)
    for name, function, (low, high) in cases.ELEMENTWISE:
        torch.manual_seed(3)
        x = torch.rand(7, dtype=F64) * (high - low) + low
        yield f"elementwise/{name}", _quadratic(lambda x, f=function: f(x).sum(), x)


def _quadratic(function: Callable[[Tensor], Tensor], x: Tensor) -> str:
    try:
        found = jp.quadratic(function, (x,), (torch.randn(3, *x.shape, dtype=x.dtype),))
    except (jp.JetplaneError, ValueError, RuntimeError, NotImplementedError) as error:
        return type(error).__name__
    return digest(found.loss, found.slope, found.curvature)


# -- optimizers -------------------------------------------------------------------------------------------------------


def _mlp(dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).to(dtype)
    return model, torch.randn(24, 5, dtype=dtype), torch.arange(24) % 3


def _cnn(dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(5)
    layers = [nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 8), nn.Dropout(0.2)]
    model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    return model, torch.randn(16, 1, 8, 8, dtype=dtype), torch.arange(16) % 3


PROBLEMS = {"mlp": _mlp, "cnn": _cnn}


def _hyperplane(family: Any, curvature: str, solver: Any, **options: Any) -> Callable[[Any], HyperplaneSearch]:
    return lambda params: HyperplaneSearch(params, 0.2, family, curvature, solver, **options)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "fgd": lambda p: FGD(p, lr=0.01),
    "fgd-3": lambda p: FGD(p, lr=0.01, k=3),
    "fomoh": lambda p: FoMoH(p, lr=0.3),
    "fomoh-samples": lambda p: FoMoH(p, lr=0.3, samples=2, weight_decay=0.01, clip=0.5),
    "fomoh-bp": lambda p: FoMoHBP(p, lr=0.3),
    "fomoh-kd": lambda p: FoMoHKD(p, lr=0.1, k=3),
    "fomoh-kd-chunks": lambda p: FoMoHKD(p, lr=0.1, k=3, chunk_size=2, maximize=False),
    "gauss-newton": lambda p: GaussNewtonSearch(p, k=4),
    "saddle-free": _hyperplane(directions.Orthonormal(3), "exact", solvers.SaddleFree()),
    "trust": _hyperplane(directions.Gaussian(3), "exact", solvers.TrustRegion(0.5)),
    "cubic": _hyperplane(directions.Rademacher(2), "exact", solvers.Cubic(1.0)),
    "marquardt": _hyperplane(
        [directions.PreviousStep(), directions.Momentum(0.9), directions.Gaussian(3)],
        "ggn",
        solvers.LevenbergMarquardt(),
    ),
    "best": _hyperplane([directions.Best(), directions.PerLayer(directions.Gaussian(1))], "ggn", solvers.SaddleFree()),
    "rank-one": _hyperplane(directions.RankOne(4), "ggn", solvers.LevenbergMarquardt()),
    "grown": _hyperplane(
        directions.Grown(directions.Gaussian, start=4, patience=2), "ggn", solvers.LevenbergMarquardt()
    ),
    "fisher": _hyperplane(directions.Gaussian(3), "fisher", solvers.SaddleFree()),
    "accepted": _hyperplane(
        directions.Gaussian(2), "exact", solvers.JitteredInverse(), accept=jp.optim.Acceptance(), patience=None
    ),
    "horizon": lambda p: HorizonAdam(p),
    "horizon-plain": lambda p: HorizonAdam(p, rotate=False, samples=4),
}
COMPILED = ("fgd-3", "fomoh", "fomoh-kd", "gauss-newton", "marquardt", "accepted")


def optimizers() -> Found:
    """Parameters after 20 steps of each, with the last report."""
    for problem, make in PROBLEMS.items():
        for name, optimizer in OPTIMIZERS.items():
            for dtype in (torch.float32, F64):
                model, x, y = make(dtype)
                key = f"optimizer/{problem}/{name}/{str(dtype)[6:]}"
                mean = name not in ("fisher", "horizon", "horizon-plain")
                yield key, _taken(lambda p, o=optimizer: o(p), model, x, y, mean)
    p = nn.Parameter(torch.tensor([-1.2, 1.0], dtype=F64))
    newton = Newton([p], lr=1.0, patience=None)
    for _ in range(STEPS):
        newton.step(lambda: (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2)
    yield "optimizer/rosenbrock/newton", digest(p)


def _taken(make: Callable[[Any], Any], model: nn.Module, x: Tensor, y: Tensor, mean: bool) -> str:
    reduction = "mean" if mean else "none"
    try:
        optimizer = make(model.parameters())
        torch.manual_seed(6)
        for _ in range(STEPS):
            loss = optimizer.step(lambda x, y: F.cross_entropy(model(x), y, reduction=reduction), x, y)
    except (jp.JetplaneError, ValueError) as error:
        return f"{type(error).__name__}: {digest(*model.parameters())}"
    return digest(loss, *model.parameters())


def compiled() -> Found:
    """Parameters after compiled steps, as numbers."""
    for name in COMPILED:
        model, x, y = _mlp(F64)
        optimizer = OPTIMIZERS[name](model.parameters())
        optimizer.compile = True
        for _ in range(5):
            optimizer.step(lambda x, y, model=model: F.cross_entropy(model(x), y), x, y)
        yield f"compiled/{name}", torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    x = torch.randn(6, dtype=F64, generator=torch.Generator().manual_seed(7))
    along = torch.randn(3, 6, dtype=F64, generator=torch.Generator().manual_seed(8))
    found = jp.compile(jp.quadratic)(lambda x: x.sin().prod() + x.pow(3).sum(), (x,), (along,))
    yield "compiled/quadratic", torch.cat([found.slope, found.curvature.flatten()]).tolist()


# -- forward gradients ------------------------------------------------------------------------------------------------


def forward_gradients() -> Found:
    """The estimates of three calls, the control variate's lessons among them, by activations and by weights."""
    exactness = helper("exactness", "test_forward_gradient")
    for case in exactness.CASES:
        torch.manual_seed(9)
        with _default(F64):
            model, data, labels = case.model().double(), case.data(), exactness.LABELS
        parameters = dict(model.named_parameters())
        for estimator in ("activation", "weight"):
            estimate = jp.ForwardGradient(parameters, samples=3, estimator=estimator, allow_unused=True)
            losses, parts = [], []
            try:
                for _ in range(3):
                    losses.append(
                        estimate(lambda x, y, m=model: F.cross_entropy(m(x), y, reduction="none"), data, labels)
                    )
                    parts += [None if p.grad is None else p.grad.clone() for p in parameters.values()]
            except (jp.JetplaneError, ValueError, RuntimeError) as error:
                yield f"forward/{case.name}/{estimator}", type(error).__name__
            else:
                yield f"forward/{case.name}/{estimator}", digest(*losses, *parts)
            model.zero_grad()


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# -- training ---------------------------------------------------------------------------------------------------------


def training() -> Found:
    """A short run, and one that was left half-way and resumed."""
    tiny = helper("tiny")
    methods: dict[str, dict[str, Any]] = {
        "fomoh-kd": {},
        "fgd": {"lr": 1e-4},
        "gauss-newton": {"lr": 1.0},
        "horizon": {"lr": 1.0},
        "forward-adam": {"lr": 1e-3},
    }
    for method, changes in methods.items():
        whole = tiny.trainer(method=method, **changes)
        list(whole.epochs())
        yield f"training/{method}", digest(*whole.model.state_dict().values())
        with tempfile.TemporaryDirectory() as folder:
            tiny.advance(tiny.trainer(Path(folder) / "run", method=method, **changes), 2)
            resumed = tiny.trainer(Path(folder) / "run", method=method, **changes)
            list(resumed.epochs())
            yield f"training/{method}/resumed", digest(*resumed.model.state_dict().values())


# -- command ----------------------------------------------------------------------------------------------------------

PARTS = {part.__name__: part for part in (planes, optimizers, forward_gradients, training, compiled)}


def take(parts: list[str]) -> dict[str, Any]:
    """All fingerprints of the named parts."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for part in parts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found |= dict(PARTS[part]())
        print(f"{part}: {len(found)} fingerprints so far", file=sys.stderr)
    return found


def differences(before: dict[str, Any], after: dict[str, Any], parts: list[str]) -> list[str]:
    """A line for each fingerprint that has changed or is gone."""
    lines = []
    for name, old in before.items():
        new = after.get(name)
        if new is None:
            lines.append(f"{name}: gone")
        elif isinstance(old, list):
            worst = max(abs(a - b) for a, b in zip(old, new, strict=True))
            if not worst <= CLOSE * max(1.0, *map(abs, old)):
                lines.append(f"{name}: {worst:.1e} apart")
        elif old != new:
            lines.append(f"{name}: {old} -> {new}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="some parts")
    arguments = parser.parse_args()
    found = take(arguments.only)
    if arguments.action == "record":
        written = arguments.file.with_suffix(".part")
        written.write_text(json.dumps({"torch": torch.__version__, "parts": arguments.only, "found": found}, indent=0))
        os.replace(written, arguments.file)
        return 0
    kept = json.loads(arguments.file.read_text())
    prefixes = {
        "planes": ("plane/", "loss/", "elementwise/"),
        "optimizers": ("optimizer/",),
        "training": ("training/",),
    }
    prefixes |= {"forward_gradients": ("forward/",), "compiled": ("compiled/",)}
    wanted = tuple(prefix for part in arguments.only for prefix in prefixes[part])
    before = {name: value for name, value in kept["found"].items() if name.startswith(wanted)}
    lines = differences(before, found, arguments.only)
    print("\n".join(lines) or f"{len(before)} fingerprints, all equal")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
