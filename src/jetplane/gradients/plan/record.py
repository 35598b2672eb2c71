"""The pass that plans: who makes and who reads which value."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from ...ad import _torch
from ...ad.draws import draws
from ...ad.engine.locate import call_site
from ...errors import UnsupportedProgram
from ..adjoints import default
from ..adjoints.adjoint import is_opaque
from ..adjoints.batch_norm import uses_batch
from ..program.parameters import Parameters
from ..program.watch import Path, Visit, WatchMode, any_complex, as_real, outputs
from ..program.writes import Writes
from .build import Builder
from .noise_plan import Node, NoisePlan, signature

__all__ = ["Recorder", "ValueGraph"]

_NOTHING, _CPU = torch.Size([]), torch.device("cpu")


class ValueGraph:
    """Who makes and who reads which value. A tensor object is one value, as long as nothing writes to its elements."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.maker: list[int] = []  # by value: the node
        self._known: dict[int, tuple[Any, int, int]] = {}  # by tensor: reference, value, writes at the time
        self._stored: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()  # by storage: values
        self._writes = Writes()

    def values(self, path: Path, tensor: Tensor) -> list[tuple[Path | None, int]]:
        """The values that a tensor holds: one, or, where something was written behind its back, any of its memory's."""
        storage = tensor.untyped_storage()
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and not self._writes.touched(tensor, known[2]):
            return [(path, known[1])]
        return [(None, value) for value in self._stored.get(storage, ())]

    def enter(self, node: Node, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            value = len(self.maker)
            self.maker.append(node.number)
            node.values.append(value)
            self._stored.setdefault(tensor.untyped_storage(), []).append(value)
            self._know(tensor, value)

    def same(self, tensor: Tensor, other: Tensor) -> None:
        known = self.values((), other)
        if len(known) == 1 and known[0][0] is not None:
            self._know(tensor, known[0][1])

    def wrote(self, tensor: Tensor) -> None:
        self._writes.note(tensor)

    def _know(self, tensor: Tensor, value: int) -> None:
        key = id(tensor)
        self._known[key] = (
            weakref.ref(tensor, lambda _: self._known.pop(key, None)),
            value,
            self._writes.count(tensor),
        )


class Recorder:
    """The phase of a pass that plans: values alone."""

    def __init__(self, parameters: Parameters) -> None:
        self.graph = ValueGraph()
        self.random = False
        self.values = self.layers = 0  # bytes of the results, and of those of layers
        self._parameters = parameters
        self._sources: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()  # of what is made

    def before(self, mode: WatchMode, visit: Visit) -> None:
        inputs = [one for path, tensor in visit.variables for one in self.graph.values(path, tensor)]
        where, paths = str(visit.func), [path for path, _ in visit.parameters]
        parameters = [tensor for _, tensor in visit.parameters]
        if parameters:
            where = call_site(where)
            with mode.above():
                default.check(visit, ", ".join(map(self._name, parameters)))
        reaches = frozenset[int]().union(*map(self._source, parameters))
        key = signature(mode, visit)
        is_complex = any_complex(visit.args, visit.kwargs)
        opaque = is_complex or is_opaque(visit.func, visit.args, visit.kwargs)
        batch = uses_batch(visit.func, visit.args)
        node = Node(
            visit.number, visit.func, key, inputs, paths, _NOTHING, _CPU, where, reaches, opaque, batch, is_complex
        )
        self.graph.nodes.append(node)

    def after(self, mode: WatchMode, visit: Visit, out: Any) -> None:
        node = self.graph.nodes[visit.number]
        tensors = outputs(out)
        variable = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
        if visit.step.writes:
            for tensor in variable:
                self.graph.wrote(tensor)
        if variable:
            first = as_real(variable[0])
            if first is not variable[0]:
                node.complex = node.opaque = True
            node.shape, node.device = first.shape, first.device
            self.values += first.nbytes
            self.layers += first.nbytes if visit.parameters else 0
        self.graph.enter(node, variable)

    def parametrised(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if draws(func, args, kwargs):
            raise UnsupportedProgram(
                f"{call_site(str(func))} draws random numbers for a function of parameters alone, which cannot be "
                "differentiated again; expected them to be drawn by an operation of their own."
            )
        given = [leaf for leaf in _torch.pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        sources = frozenset[int]().union(*map(self._source, given))
        for tensor in outputs(out):
            storage = tensor.untyped_storage()
            self._sources[storage] = self._sources.get(storage, frozenset()) | sources

    def same(self, tensor: Tensor, other: Tensor) -> None:
        self.graph.same(tensor, other)

    def wrote(self, tensor: Tensor) -> None:
        self.graph.wrote(tensor)

    def seen(self, func: Any, args: Any, kwargs: Any) -> None:
        self.random = self.random or draws(func, args, kwargs)

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is made of parameters alone."""
        return bool(self._source(tensor)) and not self.graph.values((), tensor)

    def _source(self, tensor: Tensor) -> frozenset[int]:
        index = self._parameters.find(tensor)
        if index is not None:
            return frozenset([index])
        return self._sources.get(tensor.untyped_storage(), frozenset())

    def _name(self, tensor: Tensor) -> str:
        index = self._parameters.find(tensor)
        return f"{tuple(tensor.shape)}" if index is None else f"{self._parameters.names[index]} {tuple(tensor.shape)}"

    def plan(self, mode: WatchMode, losses: Tensor, together: Collection[int] = ()) -> NoisePlan:
        """The plan, with layouts still to be found; ``together`` are nodes at which samples are not apart."""
        builder = Builder(self.graph.nodes, self.graph.values((), losses), together)
        plan = builder.plan(losses.shape[0], mode.origin(losses), self.random)
        plan.values, plan.layers = self.values, self.layers
        return plan
