"""What is measured: presets of models, K, batches and depths, which the command line can narrow or change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .problem import has_depth
from .task import Point

__all__ = ["GRIDS", "WHATS", "points"]

GRIDS = ("quick", "paper", "full")
WHATS = ("quadratic", "step", "eager-overhead")


class _Sweep(NamedTuple):
    """All K with all batches and depths."""

    model: str
    ks: tuple[int, ...]
    batches: tuple[int, ...]
    depths: tuple[int, ...] = (0,)


def _sweeps(what: str, grid: str, cuda: bool) -> list[_Sweep]:
    base = 2048 if cuda else 256
    if what == "eager-overhead":
        return [_Sweep("rosenbrock", (2,), (1,))]
    if what == "step":
        quick = [_Sweep("cnn", (2,), (16,)), _Sweep("logistic-regression", (2,), (512,))]
        paper = [_Sweep("cnn", (3,), (base,)), _Sweep("logistic-regression", (2,), (512,))]
        full = [_Sweep("cnn", (1, 2, 3, 5, 10), (base,)), _Sweep("logistic-regression", (1, 2, 3, 5, 10), (512,))]
        return {"quick": quick, "paper": paper, "full": full}[grid]
    quick = [_Sweep("cnn", (1, 2), (16,)), _Sweep("logistic-regression", (2,), (64,))]
    paper = [_Sweep("cnn", (1, 3, 10), (base,))]
    full = [
        _Sweep("cnn", (1, 2, 3, 5, 8, 10), (base,)),
        _Sweep("cnn", (3,), tuple(base * factor // 4 for factor in (1, 2, 4, 8))),
        _Sweep("logistic-regression", (1, 2, 3, 5, 10), (512,)),
        _Sweep("mlp", (3,), (base,), (1, 2, 4, 8, 16)),
        _Sweep("tanh-regression", (1, 2, 3, 5, 10), (base,)),
    ]
    return {"quick": quick, "paper": paper, "full": full}[grid]


def points(
    what: str,
    grid: str,
    cuda: bool,
    models: Sequence[str] | None = None,
    ks: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
    precisions: Sequence[str] | None = None,
) -> list[Point]:
    """The comparisons of a grid, each once; what is given takes the place of the grid's.

    Example:
        >>> [point.k for point in points("quadratic", "paper", cuda=False)]
        [1, 3, 10]
        >>> len(points("quadratic", "full", cuda=False, models=["mlp"], ks=[1, 2], depths=[4]))
        2
    """
    # a model that the grid does not have is measured as the grid's first one is
    sweeps = _sweeps(what, grid, cuda)
    if models is not None and what != "eager-overhead":
        known = {sweep.model for sweep in sweeps}
        kept = [sweep for sweep in sweeps if sweep.model in models]
        added = [sweeps[0]._replace(model=m, depths=(4,) if has_depth(m) else (0,)) for m in models if m not in known]
        sweeps = kept + added
    found = (
        Point("step" if what == "eager-overhead" else what, sweep.model, depth, k, batch, precision)
        for sweep in sweeps
        for precision in precisions or (("tf32",) if cuda else ("float32",))
        for depth, k, batch in _cells(sweep, ks, batches, depths)
    )
    return list(dict.fromkeys(found))


def _cells(
    sweep: _Sweep, ks: Sequence[int] | None, batches: Sequence[int] | None, depths: Sequence[int] | None
) -> Iterator[tuple[int, int, int]]:
    fixed = sweep.model == "rosenbrock"  # it has no data
    for depth in depths if depths is not None and has_depth(sweep.model) else sweep.depths:
        for batch in sweep.batches if fixed or batches is None else batches:
            for k in sweep.ks if ks is None else ks:
                yield depth, k, batch
