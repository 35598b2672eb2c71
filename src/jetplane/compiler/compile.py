"""The transforms compiled: the program is captured once for each signature, and the pass over it compiled.

The primals, the directions and every tensor that the program reads otherwise are inputs of what is compiled. What a
transform asks of the pass is the same :class:`Task` as where it is not compiled.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.algebra.jet import Jet, PairSet
from ..ad.run import tasks, transforms
from ..ad.run.directions import Basis, Directions, Given, Joined, Leaf
from ..ad.run.passes import Chunk, assemble, check_directions, chunks
from ..ad.run.problem import Problem, Read, Task
from ..errors import CaptureFailed
from .capture import Captured, Compiled, Graph, Run, compiled, every, every_with_aux, identity, single, single_with_aux
from .cuda_graphs import Pool, Recorded

__all__ = ["compile"]

Transform = TypeVar("Transform", bound=Callable[..., Any])

_TASKS: dict[Any, Callable[..., Task]] = {
    getattr(transforms, name): getattr(tasks, name) for name in transforms.__all__
}
_KEPT = 32  # signatures of one compiled transform
_FEW = 4  # directions at a time, at least, where a compiled pass is compared with the uncompiled one


def compile(transform: Transform) -> Transform:
    """A transform, as ``jp.quadratic`` or ``jp.laplacian``, as a function of the same arguments with compiled passes.

    A program is captured at its first call, and again where shapes, dtypes, the pairs, ``train()`` or ``eval()``
    change, a bounded number of times. One that cannot be captured, as where it asks for the value of a tensor to go
    on, is run as it is, with one warning that says why. ``chunk_size`` and ``memory`` need several passes, and are
    refused. Results are constants to autograd: where they would not be, the transform itself is called, with a warning.

    Example::

        fast = jp.compile(jp.quadratic)
        for x, y in batches:
            plane = fast(lambda params: loss(params, x, y), params, directions)  # captured once
    """
    task_of = _TASKS.get(transform) if callable(transform) else None
    if task_of is None:
        name = getattr(transform, "__name__", type(transform).__name__)
        known = ", ".join(f"jetplane.{name}" for name in transforms.__all__)
        raise ValueError(f"{name} cannot be compiled; expected one of {known}.")
    calls = _Calls(transform, task_of)

    @functools.wraps(transform)
    def fast(
        func: Callable[..., Any],
        primals: Any,
        *args: Any,
        has_aux: bool = False,
        chunk_size: int | None = None,
        memory: int | str | None = None,
        no_grad: str = "stop",
        **options: Any,
    ) -> Any:
        _refuse_chunks(chunk_size, memory)
        return calls(func, primals, has_aux, no_grad, args, options)

    return cast(Transform, fast)


def _refuse_chunks(chunk_size: int | None, memory: int | str | None) -> None:
    for name, value in (("chunk_size", chunk_size), ("memory", memory)):
        if value is not None:
            raise ValueError(f"{name} is {value!r}, which needs several passes; expected None where compiled.")


# -- directions as inputs of a graph --------------------------------------------------------------------------------


def _tensors(directions: Directions, leaves: Sequence[Tensor]) -> list[Tensor]:
    """What a graph has to be given of directions: nothing of coordinates, which it makes itself."""
    if isinstance(directions, Joined):
        return [*_tensors(directions.first, leaves), *_tensors(directions.then, leaves)]
    if isinstance(directions, Basis):
        return []
    if isinstance(directions, Given):
        return list(directions.tensors)
    return [directions.rows(position, leaf.detach(), 0, directions.k) for position, leaf in enumerate(leaves)]


def _of(directions: Directions, tensors: Iterator[Tensor], leaves: int) -> Directions:
    """The directions with these tensors in place of their own."""
    if isinstance(directions, Joined):
        return Joined(_of(directions.first, tensors, leaves), _of(directions.then, tensors, leaves))
    if isinstance(directions, Basis):
        return directions
    return Given(list(itertools.islice(tensors, leaves)))


# -- calls ----------------------------------------------------------------------------------------------------------

Made = dict[int, tuple[Tensor, ...]]  # by id of the program's output
_Leaves = list[tuple[int, int]]  # numbers of the primals, and their places among the inputs of a graph
_Function = Callable[[list[Tensor]], list[Tensor]]


class _Signature(NamedTuple):
    """What one captured program is good for; the rest is for Dynamo to see."""

    program: Hashable
    has_aux: bool
    no_grad: str
    pairs: PairSet
    kind: Hashable
    curved: bool
    rows: tuple[Any, ...]  # shape, strides, dtype and device of the directions
    differentiable: bool


class _Calls:
    """The calls of one compiled transform."""

    def __init__(self, transform: Callable[..., Any], task_of: Callable[..., Task]) -> None:
        self._transform = transform
        self._task_of = task_of
        self._known: OrderedDict[_Signature, _CompiledPass | None] = OrderedDict()  # None: run as it is
        self._warned: OrderedDict[Any, None] = OrderedDict()
        self._pools: dict[torch.device, Pool] = {}  # the memory of CUDA graphs, which all signatures share

    def __call__(
        self,
        func: Callable[..., Any],
        primals: Any,
        has_aux: bool,
        no_grad: str,
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        unchecked: list[tuple[Any, ...]] = []
        problem = Problem(func, primals, has_aux, no_grad, check=lambda *rows: unchecked.append(rows))
        task = self._task_of(problem, *args, **options)
        rows = [*_tensors(task.directions, problem.leaves), *(task.curve or ())]
        key = _Signature(
            *(identity(func), has_aux, no_grad, task.pairs, task.kind, task.curve is not None),
            tuple((row.shape, row.stride(), row.dtype, row.device) for row in rows),
            torch.is_grad_enabled(),
        )
        if key not in self._known or problem.leaves[0].device.type == "cpu":  # elsewhere it would wait for the device
            for one in unchecked:
                check_directions(*one)
        if key not in self._known:
            self._known[key] = _CompiledPass(problem, task, key.differentiable, self._pools)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        known = self._known[key]
        if known is not None:
            try:
                return known(problem, task, rows)
            except CaptureFailed as error:
                self._known[key] = None
                self._warn(func, error)
        return self._transform(func, primals, *args, has_aux=has_aux, no_grad=no_grad, **options)

    def _warn(self, func: Callable[..., Any], error: CaptureFailed) -> None:
        program = identity(func)
        if program in self._warned:
            return
        self._warned[program] = None
        if len(self._warned) > _KEPT:
            self._warned.popitem(last=False)
        name = getattr(func, "__qualname__", type(func).__name__)
        warnings.warn(f"{name} cannot be compiled and is run as it is: {error}.", stacklevel=4)


class _CompiledPass:
    """The passes over one program with directions of one signature."""

    def __init__(self, problem: Problem, task: Task, differentiable: bool, pools: dict[torch.device, Pool]) -> None:
        self._differentiable = differentiable
        self._pools = pools
        self._labels = problem.labels
        self._no_grad = problem.no_grad
        wanted, wanted_with_aux = (single, single_with_aux) if task.single else (every, every_with_aux)
        self._program = Captured(self._build, wanted_with_aux if problem.has_aux else wanted)
        # What a call hands to the graph, and the graph to the call, past the program between them:
        self._task = task
        self._primals: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._made: Made = {}

    def __call__(self, problem: Problem, task: Task, rows: list[Tensor]) -> Any:
        """The transform's result."""
        if self._differentiable:
            _refuse_gradients([*problem.leaves, *rows])
        # tensors of their own: one that the function also captures is a constant there
        self._primals = [leaf.detach() for leaf in problem.leaves]
        self._rows = [row.detach() for row in rows]
        self._task = task
        arguments = _torch.pytree.tree_unflatten(self._primals, problem.structure)
        try:
            out = self._program(problem.func, (arguments,) if problem.bare else arguments)
            if problem.has_aux:
                out, problem.aux = out
            return problem.finish(task, _torch.pytree.tree_map(self._read, out))
        finally:
            self._primals, self._rows, self._made = [], [], {}

    def _read(self, output: Any) -> Read:
        if id(output) not in self._made:
            raise TypeError(f"the program returned {type(output).__name__} {output!r}; expected a tensor.")
        return Read(output, self._made[id(output)])

    def _build(self, graph: Graph, inputs: Sequence[Tensor]) -> Run:
        """The pass over one graph of the program, compiled."""
        if self._differentiable:
            _refuse_gradients(inputs)
        places = {id(tensor): place for place, tensor in enumerate(inputs)}
        leaves = [(number, places[id(one)]) for number, one in enumerate(self._primals) if id(one) in places]
        one = _Pass(graph, self._task, leaves, len(inputs), len(self._primals), self._labels, self._no_grad)
        reference = None if graph.random else one.reference
        made = compiled(one.body, [*inputs, *self._rows], reference)
        run = self._recorded(made) if not graph.random else made  # a graph would draw the same numbers again

        def call(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            everything = list(run([*inputs, *self._rows]))
            outputs, parts = everything[: graph.outputs], everything[graph.outputs :]
            each = len(parts) // max(len(graph.wanted), 1)
            self._made = {
                id(outputs[place]): tuple(parts[number * each : (number + 1) * each])
                for number, place in enumerate(graph.wanted)
            }
            return outputs

        return call

    def _recorded(self, run: Compiled) -> Run:
        """The function as a CUDA graph, where all it reads is on one CUDA device."""
        device = self._primals[0].device
        if device.type != "cuda":
            return run
        return Recorded(run, run.written, self._pools.setdefault(device, Pool()), device)


class _Pass(NamedTuple):
    """A pass over a captured program, as a function of tensors: to be traced, and to compare that with."""

    graph: Graph
    task: Task
    leaves: _Leaves
    inputs: int  # of the program; behind them come the tensors of the directions
    primals: int
    labels: list[str]
    no_grad: str

    def body(self, tensors: list[Tensor]) -> list[Tensor]:
        """The outputs, and what is read off their jets."""
        (whole,), now = chunks(self.task.pairs, None, self.task.late), tensors[: self.inputs]
        for _, place in self.leaves:
            # a clone, for the program may write it; a compiler makes none where it does not
            now[place] = now[place].clone()
        outputs, jets = self._run(self.graph.for_jets, whole, now, tensors[self.inputs :])
        return [*outputs, *self._parts(jets)]

    def reference(self, tensors: list[Tensor]) -> list[Tensor]:
        """The same numbers, as it is and some directions at a time, so as to take no more memory."""
        pairs, found = self.task.pairs, []
        work = chunks(pairs, min(max(_FEW, math.ceil(pairs.k / 8)), pairs.k), self.task.late)
        for chunk in work:
            now = [tensor.clone() for tensor in tensors[: self.inputs]]  # the program may write them
            found.append(self._run(self.graph, chunk, now, tensors[self.inputs :]))
        outputs, _ = found[0]
        each = zip(*(jets for _, jets in found), strict=True)
        return [*outputs, *self._parts([assemble(pairs, list(zip(work, parts, strict=True))) for parts in each])]

    def _run(
        self, program: Run, chunk: Chunk, now: list[Tensor], rows: list[Tensor]
    ) -> tuple[Sequence[Tensor], list[Jet]]:
        """The program's outputs, and the jets of those that are wanted."""
        one, given = chunk.begin(self.no_grad), iter(rows)
        directions = _of(self.task.directions, given, self.primals)
        curve = None if self.task.curve is None else list(given)
        for number, place in self.leaves:
            second = None if curve is None else curve[number]
            one.perturb(Leaf(now[place], number, directions, chunk.rows, second), self.labels[number])
        with torch.no_grad(), one.running():
            outputs = program(now)
        one.check_followed(outputs[place] for place in self.graph.wanted)
        return outputs, [one.jet(outputs[place]) for place in self.graph.wanted]

    def _parts(self, jets: list[Jet]) -> list[Tensor]:
        return [part for jet in jets for part in self.task.read(jet)]


def _refuse_gradients(tensors: Sequence[Tensor]) -> None:
    if any(tensor.requires_grad for tensor in tensors):
        raise CaptureFailed(
            "it reads tensors that require grad, and what is compiled is constant to autograd; expected "
            "torch.no_grad() around the call, or detached tensors"
        )
