"""What each transform asks of a function: its directions, their pairs, and what is read off the jets.

With ``batch_ndim`` leading axes of every primal number samples that do not interact. They share the coordinate
directions, so that along coordinate d the derivative of sample b's output is that by its own entry (b, d): K is the
size of one sample, and the batch's axes are those of the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from ..algebra.curvature_table import Entry, entry
from ..algebra.jet import HyperDual, Jet, PairSet, Quadratic
from .directions import Basis, Directions, Given, Joined
from .problem import Problem, Read, Task, each

__all__ = ["gradient", "hessian", "hvp", "hyperdual", "jet", "jvp", "laplacian", "quadratic", "quadratic_of"]


def jvp(problem: Problem, tangents: Any) -> Task:
    """The derivative along one direction."""
    return Task(
        Given(problem.single(tangents, "tangents")),
        PairSet.none(1),
        read=lambda jet: (jet.tangent[0],),
        result=lambda tree: (_outputs(tree), _part(tree, 0)),
    )


def hyperdual(problem: Problem, v1: Any, v2: Any, v12: Any = None) -> Task:
    """Two directions, their pair, and where v12 is given second rows that the primals begin with."""
    first, second = problem.single(v1, "v1"), problem.single(v2, "v2")
    return Task(
        Given([torch.cat(pair) for pair in zip(first, second, strict=True)]),
        PairSet.single(),
        read=lambda jet: (jet.tangent[0], jet.tangent[1], jet.second[0]),
        result=lambda tree: (HyperDual(_outputs(tree), *(_part(tree, n) for n in range(3))),),
        curve=None if v12 is None else problem.single(v12, "v12"),
    )


def jet(problem: Problem, directions: Any, pairs: str | PairSet = "all") -> Task:
    """The jets themselves."""
    rows = problem.directions(directions)
    return Task(
        rows,
        PairSet.of(pairs, rows.k),
        read=lambda jet: (jet.tangent, jet.second),
        result=lambda tree: (Jet(_outputs(tree), _part(tree, 0), _part(tree, 1)),),
    )


def quadratic(problem: Problem, directions: Any, *, curvature: str = "exact") -> Task:
    """The model of one number, or of the losses of samples, with a curvature."""
    rows, kind = problem.directions(directions), entry(curvature)
    pairs = kind.pairs(rows.k)

    def read(jet: Jet) -> tuple[Tensor, ...]:
        model = quadratic_of(jet, pairs, kind)
        parts = model.loss, model.slope, model.curvature
        return parts if model.noise is None else (*parts, model.noise)

    return Task(
        rows,
        pairs,
        read=read,
        result=lambda tree: (Quadratic(*tree.parts),),
        late=kind.late,
        single=True,
        kind=curvature,
    )


def quadratic_of(jet: Jet, pairs: PairSet, kind: Entry) -> Quadratic:
    """The quadratic model from the jet of a scalar, or of one loss for each sample where the curvature asks for it."""
    if jet.primal.numel() != 1 and not kind.each:
        raise ValueError(f"the loss has shape {tuple(jet.primal.shape)}; expected a scalar.")
    if jet.primal.is_complex():
        raise ValueError(
            f"the loss has dtype {jet.primal.dtype}; expected a real number, such as loss.real or loss.abs()."
        )
    if not jet.primal.is_floating_point():
        raise ValueError(f"the loss has dtype {jet.primal.dtype}; expected a floating-point scalar.")
    return kind.read(jet, pairs)


def gradient(problem: Problem, *, batch_ndim: int = 0) -> Task:
    """All slopes along the coordinates."""
    basis = problem.basis(batch_ndim)
    return _coordinates(problem, basis, basis, PairSet.none(basis.k), lambda jet: jet.tangent)


def hvp(problem: Problem, v: Any, *, batch_ndim: int = 0) -> Task:
    """A star of pairs: ``v``, with entries of its own for each sample, against the coordinates."""
    basis = problem.basis(batch_ndim)
    rows = Joined(Given(problem.single(v, "v")), basis)
    return _coordinates(problem, basis, rows, PairSet.star(rows.k), lambda jet: jet.second)


def _coordinates(
    problem: Problem, basis: Basis, rows: Directions, pairs: PairSet, numbers: Callable[[Jet], Tensor]
) -> Task:
    """A task that reads a number for each coordinate, and gives them in the primals' structure."""
    return Task(
        rows,
        pairs,
        read=lambda jet: (numbers(jet).movedim(0, -1),),
        result=lambda tree: (each(tree, lambda one: _by_primal(problem, basis, one.parts[0])),),
        kind=basis.batch_ndim,
    )


def hessian(problem: Problem, *, batch_ndim: int = 0) -> Task:
    """All pairs of coordinates, as a matrix in blocks by primal."""
    basis = problem.basis(batch_ndim)
    pairs = PairSet.all(basis.k)

    def row(part: Tensor, shape: torch.Size) -> Any:  # (*out, size of one primal, K)
        out = part.shape[:-2]
        trees = _by_primal(problem, basis, part)
        return _torch.pytree.tree_map(lambda block: block.reshape((*out, *shape, *block.shape[len(out) + 1 :])), trees)

    def blocks(one: Read) -> Any:
        rows = [row(*both) for both in zip(one.parts[0].split(basis.sizes, -2), basis.each, strict=True)]
        return rows[0] if problem.bare and len(rows) == 1 else _torch.pytree.tree_unflatten(rows, problem.structure)

    return Task(
        basis,
        pairs,
        read=lambda jet: (pairs.matrix(jet.second).movedim((0, 1), (-2, -1)),),
        result=lambda tree: (each(tree, blocks),),
        kind=batch_ndim,
    )


def laplacian(problem: Problem, *, directions: Any = None, batch_ndim: int = 0) -> Task:
    """The sum of the second derivatives along the coordinates, or along directions, as a single row."""
    rows = problem.basis(batch_ndim) if directions is None else problem.directions(directions)
    return Task(
        rows,
        PairSet.laplacian(rows.k),
        read=lambda jet: (jet.second[0],),
        result=lambda tree: (_part(tree, 0),),
        kind=batch_ndim,
    )


# -- results --------------------------------------------------------------------------------------------------------


def _outputs(tree: Any) -> Any:
    return each(tree, lambda one: one.output)


def _part(tree: Any, number: int) -> Any:
    return each(tree, lambda one: one.parts[number])


def _by_primal(problem: Problem, basis: Basis, flat: Tensor) -> Any:
    """(..., K) as the primals' structure, each leaf (..., *S) of one sample."""
    parts = flat.split(basis.sizes, -1)
    shaped = [part.reshape((*part.shape[:-1], *shape)) for part, shape in zip(parts, basis.each, strict=True)]
    return _torch.pytree.tree_unflatten(shaped, problem.structure)
