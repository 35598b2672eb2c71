"""``quadratic`` and ``jet`` compiled: the program is captured once for each signature, and the pass over it compiled.

The primals, the directions and every tensor that the program reads otherwise are inputs of what is compiled.
"""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.algebra.curvature_table import CURVATURES, Order, entry
from ..ad.algebra.jet import Jet, PairSet, Quadratic
from ..ad.run import transforms
from ..ad.run.directions import Given, Leaf
from ..ad.run.passes import Chunk, assemble, check_directions, chunks, lazily
from ..ad.run.transforms import Problem, quadratic_of
from ..errors import CaptureFailed
from .capture import Captured, Compiled, Graph, Run, compiled, every, every_with_aux, identity, single, single_with_aux
from .cuda_graphs import Pool, Recorded

__all__ = ["compile"]

Transform = TypeVar("Transform", bound=Callable[..., Any])

_KEPT = 32  # signatures of one compiled transform
_FEW = 4  # directions at a time, where a compiled pass is compared with the uncompiled one


def compile(transform: Transform) -> Transform:
    """``jp.quadratic`` or ``jp.jet`` as a function with the same arguments whose passes are compiled.

    A program is captured at its first call, and again where shapes, dtypes, the pairs, ``train()`` or ``eval()``
    change, a bounded number of times. One that cannot be captured, as where it asks for the value of a tensor to go
    on, is run as it is, with one warning that says why. ``chunk_size`` and ``memory`` need several passes, and are
    refused. Results are constants to autograd: where they would not be, the transform itself is called, with a warning.

    Example::

        fast = jp.compile(jp.quadratic)
        for x, y in batches:
            plane = fast(lambda params: loss(params, x, y), params, directions)  # captured once
    """
    if transform is transforms.quadratic:
        planes = {name: _Calls(transforms.quadratic, _AsQuadratic(name)) for name in CURVATURES}

        @functools.wraps(transform)
        def quadratic(
            func: Callable[..., Any],
            primals: Any,
            directions: Any,
            *,
            curvature: str = "exact",
            has_aux: bool = False,
            chunk_size: int | None = None,
            memory: int | str | None = None,
            no_grad: str = "stop",
        ) -> Any:
            _refuse_chunks(chunk_size, memory)
            pairs = "none" if entry(curvature).order is Order.FIRST else "all"
            return planes[curvature](func, primals, directions, pairs, has_aux, no_grad)

        return cast(Transform, quadratic)
    if transform is transforms.jet:
        jets = _Calls(transforms.jet, _AsJet())

        @functools.wraps(transform)
        def jet(
            func: Callable[..., Any],
            primals: Any,
            directions: Any,
            pairs: str | PairSet = "all",
            *,
            has_aux: bool = False,
            chunk_size: int | None = None,
            memory: int | str | None = None,
            no_grad: str = "stop",
        ) -> Any:
            _refuse_chunks(chunk_size, memory)
            return jets(func, primals, directions, pairs, has_aux, no_grad)

        return cast(Transform, jet)
    name = getattr(transform, "__name__", type(transform).__name__)
    raise ValueError(f"{name} cannot be compiled; expected jetplane.quadratic or jetplane.jet.")


def _refuse_chunks(chunk_size: int | None, memory: int | str | None) -> None:
    for name, value in (("chunk_size", chunk_size), ("memory", memory)):
        if value is not None:
            raise ValueError(f"{name} is {value!r}, which needs several passes; expected None where compiled.")


# -- what is made of the jets ---------------------------------------------------------------------------------------

Made = dict[int, tuple[Tensor, ...]]  # by id of the program's output
_Leaves = list[tuple[int, int]]  # numbers of the primals, and their places among the inputs of a graph
_Function = Callable[[list[Tensor]], list[Tensor]]


class _AsQuadratic:
    """The quadratic model of the one output."""

    wanted, wanted_with_aux = single, single_with_aux

    def __init__(self, curvature: str) -> None:
        self._name, self._entry = curvature, CURVATURES[curvature]
        self.late = self._entry.late

    def of(self, jet: Jet, pairs: PairSet) -> tuple[Tensor, ...]:
        model = quadratic_of(jet, pairs, self._entry)
        parts = model.loss, model.slope, model.curvature
        return parts if model.noise is None else (*parts, model.noise)

    def result(self, out: Any, made: Made) -> Quadratic:
        return Quadratic(*made[id(out)])

    def eager(self, pairs: PairSet) -> dict[str, Any]:
        """The options of the transform itself."""
        return {"curvature": self._name}


class _AsJet:
    """The jets of all outputs, each field with their structure."""

    wanted, wanted_with_aux = every, every_with_aux
    late = False

    def of(self, jet: Jet, pairs: PairSet) -> tuple[Tensor, ...]:
        return jet.tangent, jet.second

    def result(self, out: Any, made: Made) -> Jet:
        for leaf in _torch.pytree.tree_leaves(out):
            if id(leaf) not in made:
                raise TypeError(f"the program returned {type(leaf).__name__} {leaf!r}; expected a tensor.")
        tangent, second = (_torch.pytree.tree_map(lambda leaf, n=n: made[id(leaf)][n], out) for n in range(2))
        return Jet(out, tangent, second)

    def eager(self, pairs: PairSet) -> dict[str, Any]:
        """The options of the transform itself."""
        return {"pairs": pairs}


# -- calls ----------------------------------------------------------------------------------------------------------


class _Signature(NamedTuple):
    """What one captured program is good for; the rest is for Dynamo to see."""

    program: Hashable
    has_aux: bool
    no_grad: str
    pairs: PairSet
    rows: tuple[Any, ...]  # shape, strides, dtype and device of the directions
    differentiable: bool


class _Calls:
    """The calls of one compiled transform."""

    def __init__(self, transform: Callable[..., Any], kind: _AsQuadratic | _AsJet) -> None:
        self._transform = transform
        self._kind = kind
        self._known: OrderedDict[_Signature, _CompiledPass | None] = OrderedDict()  # None: run as it is
        self._warned: OrderedDict[Any, None] = OrderedDict()
        self._pools: dict[torch.device, Pool] = {}  # the memory of CUDA graphs, which all signatures share

    def __call__(
        self,
        func: Callable[..., Any],
        primals: Any,
        directions: Any,
        pairs: str | PairSet,
        has_aux: bool,
        no_grad: str,
    ) -> Any:
        problem = Problem(func, primals, has_aux, no_grad)
        rows = _rows(problem, directions)
        pairs = PairSet.of(pairs, rows[0].shape[0])
        key = _Signature(
            *(identity(func), has_aux, no_grad, pairs),
            tuple((row.shape, row.stride(), row.dtype, row.device) for row in rows),
            torch.is_grad_enabled(),
        )
        if key not in self._known or rows[0].device.type == "cpu":  # elsewhere it would wait for the device each time
            check_directions(rows, problem.leaves, problem.labels)
        if key not in self._known:
            self._known[key] = _CompiledPass(problem, pairs, self._kind, key.differentiable, self._pools)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        one = self._known[key]
        if one is not None:
            try:
                return one(problem, rows)
            except CaptureFailed as error:
                self._known[key] = None
                self._warn(func, error)
        return self._transform(func, primals, directions, has_aux=has_aux, no_grad=no_grad, **self._kind.eager(pairs))

    def _warn(self, func: Callable[..., Any], error: CaptureFailed) -> None:
        program = identity(func)
        if program in self._warned:
            return
        self._warned[program] = None
        if len(self._warned) > _KEPT:
            self._warned.popitem(last=False)
        name = getattr(func, "__qualname__", type(func).__name__)
        warnings.warn(f"{name} cannot be compiled and is run as it is: {error}.", stacklevel=4)


def _rows(problem: Problem, directions: Any) -> list[Tensor]:
    """The directions as tensors (K, *S); those that are lazy are made."""
    lazy = lazily(directions)
    if lazy is not None:
        return [lazy.rows(position, leaf.detach(), 0, lazy.k) for position, leaf in enumerate(problem.leaves)]
    rows, structure = _torch.pytree.tree_flatten(directions)
    if structure != problem.structure or not all(isinstance(row, Tensor) and row.ndim for row in rows):
        problem.directions(directions)  # says what is wrong
    return rows


class _CompiledPass:
    """The passes over one program with directions of one signature."""

    def __init__(
        self,
        problem: Problem,
        pairs: PairSet,
        kind: _AsQuadratic | _AsJet,
        differentiable: bool,
        pools: dict[torch.device, Pool],
    ) -> None:
        self._pairs = pairs
        self._kind = kind
        self._differentiable = differentiable
        self._pools = pools
        self._labels = problem.labels
        self._no_grad = problem.no_grad
        self._program = Captured(self._build, type(kind).wanted_with_aux if problem.has_aux else type(kind).wanted)
        # What a call hands to the graph, and the graph to the call, past the program between them:
        self._primals: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._made: Made = {}

    def __call__(self, problem: Problem, rows: list[Tensor]) -> Any:
        """The transform's result."""
        if self._differentiable:
            _refuse_gradients([*problem.leaves, *rows])
        # tensors of their own: one that the function also captures is a constant there
        self._primals = [leaf.detach() for leaf in problem.leaves]
        self._rows = [row.detach() for row in rows]
        arguments = _torch.pytree.tree_unflatten(self._primals, problem.structure)
        try:
            out = self._program(problem.func, (arguments,) if problem.bare else arguments)
            if problem.has_aux:
                out, problem.aux = out
            return problem.finish(self._kind.result(out, self._made))
        finally:
            self._primals, self._rows, self._made = [], [], {}

    def _build(self, graph: Graph, inputs: Sequence[Tensor]) -> Run:
        """The pass over one graph of the program, compiled."""
        if self._differentiable:
            _refuse_gradients(inputs)
        places = {id(tensor): place for place, tensor in enumerate(inputs)}
        leaves = [(number, places[id(one)]) for number, one in enumerate(self._primals) if id(one) in places]
        reference = None if graph.random else self._reference(graph, leaves, len(inputs))
        made = compiled(self._body(graph, leaves, len(inputs)), [*inputs, *self._rows], reference)
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
        device = self._rows[0].device
        if device.type != "cuda":
            return run
        return Recorded(run, run.written, self._pools.setdefault(device, Pool()), device)

    def _body(self, graph: Graph, leaves: _Leaves, count: int) -> _Function:
        """The pass, to be traced."""

        def body(tensors: list[Tensor]) -> list[Tensor]:
            (whole,), now = chunks(self._pairs, None, self._kind.late), tensors[:count]
            for _, place in leaves:
                # a clone, for the program may write it; a compiler makes none where it does not
                now[place] = now[place].clone()
            outputs, jets = self._pass(graph, graph.for_jets, leaves, whole, now, tensors[count:])
            return [*outputs, *self._parts(jets)]

        return body

    def _reference(self, graph: Graph, leaves: _Leaves, count: int) -> _Function:
        """The same numbers, for a comparison: as it is and a few directions at a time, so as to take no more memory."""

        def reference(tensors: list[Tensor]) -> list[Tensor]:
            work, found = chunks(self._pairs, min(_FEW, self._pairs.k), self._kind.late), []
            for chunk in work:
                now = [tensor.clone() for tensor in tensors[:count]]  # the program may write them
                found.append(self._pass(graph, graph, leaves, chunk, now, tensors[count:]))
            outputs, _ = found[0]
            each = zip(*(jets for _, jets in found), strict=True)
            jets = [assemble(self._pairs, list(zip(work, parts, strict=True))) for parts in each]
            return [*outputs, *self._parts(jets)]

        return reference

    def _pass(
        self, graph: Graph, program: Run, leaves: _Leaves, chunk: Chunk, now: list[Tensor], rows: list[Tensor]
    ) -> tuple[Sequence[Tensor], list[Jet]]:
        """The program's outputs, and the jets of those that are wanted."""
        one, directions = chunk.begin(self._no_grad), Given(rows)
        for number, place in leaves:
            one.perturb(Leaf(now[place], number, directions, chunk.rows), self._labels[number])
        with torch.no_grad(), one.running():
            outputs = program(now)
        one.check_followed(outputs[place] for place in graph.wanted)
        return outputs, [one.jet(outputs[place]) for place in graph.wanted]

    def _parts(self, jets: list[Jet]) -> list[Tensor]:
        return [part for jet in jets for part in self._kind.of(jet, self._pairs)]


def _refuse_gradients(tensors: Sequence[Tensor]) -> None:
    if any(tensor.requires_grad for tensor in tensors):
        raise CaptureFailed(
            "it reads tensors that require grad, and what is compiled is constant to autograd; expected "
            "torch.no_grad() around the call, or detached tensors"
        )
