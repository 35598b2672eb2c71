"""Slope and curvature against finite differences, on the user's very program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .directions import Given, Leaf
from .jet import PairSet
from .passes import Pass, check_leaf
from .program import as_closure
from .replay import Replay

__all__ = ["Check", "Verification", "verify"]

_STEPS = {torch.float64: (1e-4, 1e-5, 1e-6, 1e-7), torch.float32: (1e-2, 1e-3, 1e-4, 1e-5)}


@dataclass(frozen=True)
class Check:
    """One number of the engine beside its finite difference."""

    where: str  # all parameters together, or one of them
    what: str  # slope or curvature
    engine: float
    difference: float
    uncertainty: float  # of the finite difference

    @property
    def verdict(self) -> str:
        """``agree``, ``differ``, or ``unclear`` where the finite difference is too uncertain to tell."""
        size = max(abs(self.engine), abs(self.difference))
        if abs(self.engine - self.difference) <= 3 * self.uncertainty + 1e-6 * size:
            return "agree" if self.uncertainty <= 0.1 * size or size <= self.uncertainty else "unclear"
        return "differ"


@dataclass(frozen=True)
class Verification:
    """What :func:`verify` found."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return all(check.verdict != "differ" for check in self.checks)

    @property
    def differing(self) -> tuple[str, ...]:
        """The tensors at which engine and finite differences part."""
        return tuple(dict.fromkeys(c.where for c in self.checks if c.verdict == "differ" and c.where != _ALL))

    def __str__(self) -> str:
        lines = [
            f"{c.verdict:8}{c.what:11}{c.where}: engine {c.engine:.9g}, finite difference {c.difference:.9g}"
            f" +- {c.uncertainty:.1g}"
            for c in self.checks
        ]
        return "\n".join(lines)


_ALL = "all together"


def verify(func: Callable[..., Any], params: Any, *, seed: int = 0) -> Verification:
    """Compare slope and curvature along a random direction with finite differences, and say where they part.

    ``func`` is a closure without arguments that uses ``params`` in place, or a function of them; it returns a scalar.
    The slope is checked with differences of the loss, the curvature with differences of the slope. Every evaluation
    sees the same random numbers and buffers; afterwards these and ``params`` are as before, bit by bit. Where the whole
    differs, each tensor is checked alone.

    Example:
        >>> verify(lambda x: (x**3).sum(), torch.tensor([1.0, 2.0], dtype=torch.float64)).ok
        True
    """
    program, named = as_closure(func, params)
    for label, tensor in named.items():
        check_leaf(tensor, label)
    problem = _Differences(program, named)
    generator = torch.Generator().manual_seed(seed)
    direction = {
        label: torch.randn(t.shape, generator=generator, device="cpu").to(t) * _scale(t.detach())
        for label, t in named.items()
    }
    try:
        checks = problem.compare(_ALL, direction)
        if any(check.verdict == "differ" for check in checks):
            for label in named:
                alone = {name: d if name == label else torch.zeros_like(d) for name, d in direction.items()}
                checks += problem.compare(label, alone)
    finally:
        problem.replay.rewind()
    return Verification(tuple(checks))


def _scale(tensor: Tensor) -> float:
    """The typical size of the tensor's entries, so that one step moves all tensors alike."""
    return max(float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0, 1e-2)


class _Differences:
    """Evaluations of the program beside the point, all with the same random numbers and buffers."""

    def __init__(self, program: Callable[[], Any], named: dict[str, Tensor]) -> None:
        self._program = program
        self._named = named
        self.replay = Replay(t.device for t in named.values())
        coarse = max(named.values(), key=lambda t: torch.finfo(t.dtype).eps).dtype
        self._steps = _STEPS.get(coarse, (1e-1, 3e-2, 1e-2))
        self._eps = float(torch.finfo(coarse).eps)

    def compare(self, where: str, direction: dict[str, Tensor]) -> list[Check]:
        """Slope and curvature along ``direction``."""
        loss, slope, curvature = self._evaluate(direction, 0.0)
        losses: list[tuple[float, float]] = []
        slopes: list[tuple[float, float]] = []
        for step in self._steps:
            up, down = self._evaluate(direction, step), self._evaluate(direction, -step)
            losses.append(((up[0] - down[0]) / (2 * step), self._eps * abs(loss) / step))
            slopes.append(((up[1] - down[1]) / (2 * step), self._eps * abs(slope) / step))
        return [
            Check(where, "slope", slope, *_settled(losses)),
            Check(where, "curvature", curvature, *_settled(slopes)),
        ]

    def _evaluate(self, direction: dict[str, Tensor], step: float) -> tuple[float, float, float]:
        """Loss, slope and curvature at ``step`` along the direction; the tensors are put back."""
        tensors = list(self._named.values())
        saved = [t.detach().clone() for t in tensors]
        rows = [direction[label].unsqueeze(0) for label in self._named]
        one = Pass(PairSet.all(1))
        with torch.no_grad():
            try:
                for tensor, d in zip(tensors, direction.values(), strict=True):
                    tensor.add_(d, alpha=step)
                for position, (label, tensor) in enumerate(self._named.items()):
                    one.perturb(Leaf(tensor, position, Given(rows), (0,)), label)
                loss = self.replay.run(lambda: self._run(one))
            finally:
                for tensor, contents in zip(tensors, saved, strict=True):
                    tensor.copy_(contents)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"the program returned {shape}; expected a scalar loss.")
        jet = one.jet(loss)
        return float(loss), float(jet.tangent), float(jet.second)

    def _run(self, one: Pass) -> Any:
        with one.running():
            return self._program()


def _settled(estimates: list[tuple[float, float]]) -> tuple[float, float]:
    """The estimate at the finest step that rounding noise leaves meaningful, and how uncertain it is.

    Not the one that changes least: a program with many kinks settles at a wrong value until steps are shorter than
    the way to the nearest kink.
    """
    candidates = [(fine, max(abs(fine - coarse), noise), noise) for (coarse, _), (fine, noise) in pairwise(estimates)]
    clean = [c for c in candidates if c[2] <= 1e-2 * abs(c[0])]
    value, uncertainty, _ = clean[-1] if clean else min(candidates, key=lambda c: c[1])
    return value, uncertainty
