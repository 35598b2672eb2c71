"""A function with what it is differentiated by, and what a transform asks of it.

The transforms differ in their directions, in the pairs of these that are carried, and in what is read off the jets of
the results. A :class:`Task` says so, for passes as they are (here) and for compiled ones (``compiler/compile.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch
from ..algebra.jet import Jet, PairSet
from ..engine.guards import refuse_transforms
from .auxiliary import split_aux
from .budget import chunk_size_of
from .directions import Basis, Directions, Given, Leaf
from .passes import Chunk, assemble, check_directions, check_leaf, chunks, lazily
from .replay import Replay

__all__ = ["Problem", "Read", "Task", "each"]

_map, _leaves, _unflatten = _torch.pytree.tree_map, _torch.pytree.tree_leaves, _torch.pytree.tree_unflatten


class Read(NamedTuple):
    """An output of the function, and the tensors that were read off its jet."""

    output: Tensor
    parts: tuple[Tensor, ...]


@dataclass(frozen=True)
class Task:
    """What a transform asks of a function."""

    directions: Directions
    pairs: PairSet
    read: Callable[[Jet], tuple[Tensor, ...]]  # of the jet of one output, as many tensors for each of them
    result: Callable[[Any], tuple[Any, ...]]  # of the outputs' tree, in which each is a Read
    late: bool = False  # second order begins at the loss
    single: bool = False  # the function returns one tensor and no tree
    curve: list[Tensor] | None = None  # second rows of the primals themselves
    kind: Hashable = None  # tells tasks of one transform apart that read differently


def each(tree: Any, read: Callable[[Read], Any]) -> Any:
    """The outputs' tree with ``read`` of each output."""
    return _map(read, tree, is_leaf=lambda value: isinstance(value, Read))


class Problem:
    """A function with its primals laid out flat."""

    def __init__(
        self,
        func: Callable[..., Any],
        primals: Any,
        has_aux: bool,
        no_grad: str = "stop",
        check: Callable[[list[Tensor], list[Tensor], list[str]], None] = check_directions,
    ) -> None:
        if not callable(func):
            raise TypeError(f"func is {type(func).__name__}; expected a callable.")
        refuse_transforms()
        self.func = func
        self.has_aux = has_aux
        self.no_grad = no_grad
        self._check = check
        self.bare = not isinstance(primals, tuple)
        self.leaves, self.structure = _torch.pytree.tree_flatten(primals)
        if not self.leaves:
            raise ValueError("primals hold no tensor; expected at least one to perturb.")
        self.labels = [f"primal {i}" if len(self.leaves) > 1 else "the primal" for i in range(len(self.leaves))]
        for leaf, label in zip(self.leaves, self.labels, strict=True):
            check_leaf(leaf, label, real=False)
        self.aux: Any = None
        self.batch_ndim = 0

    def directions(self, given: Any) -> Directions:
        """The user's directions, checked, or their lazy directions."""
        lazy = lazily(given)
        if lazy is not None:
            return lazy
        leaves = self._flat(given, "directions")
        whole = all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves)  # else it says at once what they are
        (self._check if whole else check_directions)(leaves, self.leaves, self.labels)
        return Given(leaves)

    def single(self, given: Any, name: str) -> list[Tensor]:
        """One direction, without the leading axis, as rows of one."""
        leaves = self._flat(given, name)
        rows = []
        for leaf, primal, label in zip(leaves, self.leaves, self.labels, strict=True):
            if not isinstance(leaf, Tensor):
                raise TypeError(f"{name} for {label} is {type(leaf).__name__}; expected a tensor.")
            if leaf.shape != primal.shape:
                raise ValueError(f"{name} for {label} has shape {tuple(leaf.shape)}; expected {tuple(primal.shape)}.")
            rows.append(leaf.unsqueeze(0))
        self._check(rows, self.leaves, self.labels)
        return rows

    def _flat(self, given: Any, name: str) -> list[Any]:
        """The leaves of what is given for the primals."""
        leaves, structure = _torch.pytree.tree_flatten(given)
        if structure == self.structure:  # as nearly always: a compiled plane's call has no time for more
            return leaves
        primals = _unflatten(self.leaves, self.structure)
        if isinstance(given, dict) and isinstance(primals, dict):
            lacking = [key for key in primals if key not in given]
            beyond = [key for key in given if key not in primals]
            if lacking or beyond:
                raise ValueError(
                    f"the names of {name} lack {lacking or 'nothing'} and have {beyond or 'nothing'} beyond the "
                    "primals'; expected the same names, with zeros for what is not to move."
                )
            leaves, structure = _torch.pytree.tree_flatten({key: given[key] for key in primals})  # in their order
            if structure == self.structure:
                return leaves
        found, expected = (" ".join(str(one).split()) for one in (structure, self.structure))
        raise ValueError(f"the structure of {name} is {found}; expected the primals' {expected}.")

    def basis(self, batch_ndim: int = 0) -> Basis:
        """The coordinate directions of the primals, which the samples of ``batch_ndim`` leading axes share."""
        for leaf, label in zip(self.leaves, self.labels, strict=True):
            check_leaf(leaf, label)
            if not 0 <= batch_ndim <= leaf.ndim:
                shape = tuple(leaf.shape)
                raise ValueError(f"batch_ndim is {batch_ndim}; expected 0 to {leaf.ndim} for {label} {shape}.")
        self.batch_ndim = batch_ndim
        return Basis([leaf.shape for leaf in self.leaves], batch_ndim)

    def take(self, task: Task, chunk_size: int | None = None, memory: int | str | None = None) -> Any:
        """The transform's result."""
        tree = self._run(task, chunk_size, memory)
        if task.single and not isinstance(tree, Jet):
            raise ValueError(f"the function returned {type(tree).__name__}; expected one scalar tensor.")
        return self.finish(task, _map(lambda jet: Read(jet.primal, task.read(jet)), tree, is_leaf=_is_jet))

    def finish(self, task: Task, tree: Any) -> Any:
        """The transform's result from what was read, with the auxiliary output behind it where there is one."""
        each(tree, self._check_samples)
        result = task.result(tree)
        result = (*result, self.aux) if self.has_aux else result
        return result[0] if len(result) == 1 else result

    def _check_samples(self, one: Read) -> None:
        """Refuse results without an entry for each sample: a sum over samples has derivatives of them all, added up."""
        samples = torch.broadcast_shapes(*(leaf.shape[: self.batch_ndim] for leaf in self.leaves))
        if one.output.shape[: self.batch_ndim] != samples:
            raise ValueError(
                f"batch_ndim is {self.batch_ndim} and func returned shape {tuple(one.output.shape)}; expected one "
                f"result for each sample, with {tuple(samples)} in front."
            )

    def _run(self, task: Task, chunk_size: int | None, memory: int | str | None) -> Any:
        """The jets of all outputs, as a tree."""
        one, pairs = partial(self._pass, task.directions, task.curve), task.pairs
        devices = [leaf.device for leaf in self.leaves]
        work = chunks(pairs, chunk_size_of(memory, chunk_size, pairs, one, devices, task.late), task.late)
        if len(work) == 1:
            return one(work[0])
        replay = Replay(devices)
        trees = [replay.run(partial(one, chunk)) for chunk in work]
        flat = [_leaves(tree, is_leaf=_is_jet) for tree in trees]
        structure = _torch.pytree.tree_structure(trees[0], is_leaf=_is_jet)
        jets = [assemble(pairs, list(zip(work, parts, strict=True))) for parts in zip(*flat, strict=True)]
        return _unflatten(jets, structure)

    def _pass(self, directions: Directions, curve: list[Tensor] | None, chunk: Chunk) -> Any:
        # Clones: a tensor that the function also captures is a constant there, and must not be perturbed.
        clones = [leaf.clone() for leaf in self.leaves]
        one = chunk.begin(self.no_grad)
        for position, (clone, label) in enumerate(zip(clones, self.labels, strict=True)):
            second = None if curve is None else curve[position]
            one.perturb(Leaf(clone, position, directions, chunk.rows, second), label)
        arguments = _unflatten(clones, self.structure)
        with one.running():
            out = self.func(arguments) if self.bare else self.func(*arguments)
        out, self.aux = split_aux(out, self.has_aux)
        one.check_followed(_leaves(out))
        return _map(one.jet, out)


def _is_jet(value: Any) -> bool:
    return isinstance(value, Jet)
