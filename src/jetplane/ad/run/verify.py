"""Slope and curvature against finite differences, on the user's very program."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from ..algebra.jet import PairSet, Quadratic
from .directions import Given, Leaf
from .passes import Pass, check_leaf
from .program import as_closure
from .replay import Replay

__all__ = ["Check", "Verification", "verify"]

_STEPS = {torch.float64: (1e-4, 1e-5, 1e-6, 1e-7), torch.float32: (1e-2, 1e-3, 1e-4, 1e-5)}
_SETTLED = 0.1  # of a difference: one that the last shorter step has changed by more has no limit in sight


@dataclass(frozen=True)
class Check:
    """One number of the engine beside its finite difference."""

    where: str  # all parameters together, or one of them
    what: str  # slope i, or curvature i,j, of directions i and j
    engine: float
    difference: float
    uncertainty: float  # of the finite difference
    scale: float = 0.0  # of all slopes and curvatures there: what is far below it counts as zero

    @property
    def verdict(self) -> str:
        """``agree``, ``differ``, or ``inconclusive`` where the finite difference is too uncertain to tell."""
        size = max(abs(self.engine), abs(self.difference))
        if not abs(self.engine - self.difference) <= 3 * self.uncertainty + 1e-6 * size:
            return "differ"
        return "agree" if self.uncertainty <= max(0.1 * size, 1e-3 * self.scale) else "inconclusive"


@dataclass(frozen=True)
class Verification:
    """What :func:`verify` found.

    Example:
        >>> import jetplane as jp
        >>> found = jp.verify(lambda x: x.sin().sum(), torch.ones(3, dtype=torch.float64))
        >>> found.ok, found.differing
        (True, ())
    """

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing differs, and finite differences had the power to tell of some number at least."""
        verdicts = {check.verdict for check in self.checks}
        return "differ" not in verdicts and "agree" in verdicts

    @property
    def differing(self) -> tuple[str, ...]:
        """The tensors at which engine and finite differences part."""
        return tuple(dict.fromkeys(c.where for c in self.checks if c.verdict == "differ" and c.where != _ALL))

    def __str__(self) -> str:
        lines = [
            f"{c.verdict:14}{c.what:15}{c.where}: engine {c.engine:.9g}, finite difference {c.difference:.9g}"
            f" +- {c.uncertainty:.1g}"
            for c in self.checks
        ]
        return "\n".join(lines)


_ALL = "all together"


@_torch.apart_from_graphs
def verify(func: Callable[..., Any], params: Any, *, seed: int = 0, directions: int = 3) -> Verification:
    """Compare slopes and curvatures along random directions with finite differences, and say where they part.

    ``func`` is a closure without arguments that uses ``params`` in place, or a function of them; it returns a scalar.
    All ``directions`` are carried by one pass, as a step carries them. Slopes are checked with differences of the loss,
    curvatures and their cross terms with differences of the slopes. Every evaluation sees the same random numbers and
    buffers; afterwards these and ``params`` are as before, bit by bit. Where the whole differs, each tensor is checked
    alone. It takes 8 passes for each direction. Finite differences see through ``torch.no_grad()``, so the pass
    does, too: ``no_grad="follow"``.

    Example:
        >>> verify(lambda x: (x**3).sum(), torch.tensor([1.0, 2.0], dtype=torch.float64)).ok
        True
    """
    if not isinstance(directions, int) or directions < 1:
        raise ValueError(f"directions is {directions!r}; expected a positive integer.")
    program, named = as_closure(func, params)
    for label, tensor in named.items():
        check_leaf(tensor, label, real=False)
    problem = _Differences(program, named)
    generator = torch.Generator().manual_seed(seed)
    rows = {
        label: _drawn((directions, *t.shape), t.is_complex(), generator).to(t) * _scale(t.detach())
        for label, t in named.items()
    }
    try:
        checks = problem.compare(_ALL, rows)
        if any(check.verdict == "differ" for check in checks):
            for label in named:
                alone = {name: d if name == label else torch.zeros_like(d) for name, d in rows.items()}
                checks += problem.compare(label, alone)
    finally:
        problem.replay.rewind()
    return Verification(tuple(checks))


def _drawn(shape: tuple[int, ...], is_complex: bool, generator: torch.Generator) -> Tensor:
    dtype = torch.get_default_dtype()
    return torch.randn(shape, generator=generator, device="cpu", dtype=dtype.to_complex() if is_complex else dtype)


def _scale(tensor: Tensor) -> float:
    """The typical size of the tensor's entries, so that one step moves all tensors alike."""
    return max(float(tensor.abs().double().square().mean().sqrt()) if tensor.numel() else 0.0, 1e-2)


class _Differences:
    """Evaluations of the program beside the point, all with the same random numbers and buffers."""

    def __init__(self, program: Callable[[], Any], named: dict[str, Tensor]) -> None:
        self._program = program
        self._named = named
        self.replay = Replay(t.device for t in named.values())
        coarse = max(named.values(), key=lambda t: torch.finfo(t.dtype).eps).dtype
        self._steps = _STEPS.get(coarse, (1e-1, 3e-2, 1e-2))
        self._eps = float(torch.finfo(coarse).eps)

    def compare(self, where: str, rows: dict[str, Tensor]) -> list[Check]:
        """Slopes and curvatures along the directions ``rows``."""
        model = self._evaluate(rows)
        slope, curvature, loss = model.slope.tolist(), model.curvature.tolist(), float(model.loss)
        found: list[tuple[str, float, float, float]] = []
        for i in range(model.k):
            losses: list[tuple[float, float]] = []
            slopes: list[list[tuple[float, float]]] = [[] for _ in range(i, model.k)]
            for step in self._steps:
                up, down = self._evaluate(rows, i, step), self._evaluate(rows, i, -step)
                losses.append((float(up.loss - down.loss) / (2 * step), self._eps * abs(loss) / step))
                for j, estimates in enumerate(slopes, i):
                    estimates.append(
                        (float(up.slope[j] - down.slope[j]) / (2 * step), self._eps * abs(slope[j]) / step)
                    )
            found.append((f"slope {i}", slope[i], *_settled(losses)))
            for j, estimates in enumerate(slopes, i):
                found.append((f"curvature {i},{j}", curvature[i][j], *_settled(estimates)))
        scale = max(abs(number) for number in (1e-3 * loss, *slope, *(n for row in curvature for n in row)))
        return [Check(where, *numbers, scale) for numbers in found]

    def _evaluate(self, rows: dict[str, Tensor], along: int = 0, step: float = 0.0) -> Quadratic:
        """The quadratic model at ``step`` along direction ``along``; the tensors are put back."""
        tensors = list(self._named.values())
        saved = [t.detach().clone() for t in tensors]
        given = Given([rows[label] for label in self._named])
        numbers = tuple(range(given.k))
        pairs = PairSet.all(given.k) if step == 0.0 else PairSet.none(given.k)
        one = Pass(pairs, no_grad="follow")  # as finite differences do
        with torch.no_grad():
            try:
                for tensor, d in zip(tensors, rows.values(), strict=True):
                    tensor.add_(d[along], alpha=step)
                for position, (label, tensor) in enumerate(self._named.items()):
                    one.perturb(Leaf(tensor, position, given, numbers), label)
                loss = self.replay.run(lambda: self._run(one))
            finally:
                for tensor, contents in zip(tensors, saved, strict=True):
                    tensor.copy_(contents)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"the program returned {shape}; expected a scalar loss.")
        if loss.is_complex():
            raise ValueError(f"the program returned a loss of {loss.dtype}; expected a real number.")
        jet = one.jet(loss)
        curvature = pairs.matrix(jet.second.reshape(pairs.rows))
        return Quadratic(loss.detach().reshape(()), jet.tangent.reshape(given.k), curvature)

    def _run(self, one: Pass) -> Any:
        with one.running():
            return self._program()


def _settled(estimates: list[tuple[float, float]]) -> tuple[float, float]:
    """The estimate at the finest step that rounding noise leaves meaningful, and how uncertain it is.

    Not the one that changes least: a program with many kinks settles at a wrong value until steps are shorter than
    the way to the nearest kink. One that grows or jumps about with a shorter step says nothing: the program varies
    within it.
    """
    steps = [(coarse, fine, noise) for (coarse, _), (fine, noise) in pairwise(estimates)]
    clean = [(coarse, fine, noise) for coarse, fine, noise in steps if noise <= 1e-2 * abs(fine)]
    if not clean:
        return min(
            ((fine, max(abs(fine - coarse), noise)) for coarse, fine, noise in steps), key=lambda found: found[1]
        )
    coarse, fine, noise = clean[-1]
    change = abs(fine - coarse)
    return fine, math.inf if change > _SETTLED * abs(fine) else max(change, noise)
