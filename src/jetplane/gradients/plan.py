"""The plan of a program: its nodes, where noise enters, and through what it is pulled back to the layers."""

from __future__ import annotations

import hashlib
import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.budget import Trace
from ..ad.locate import call_site
from ..ad.registry import plan as engine_plan
from ..errors import UnsupportedProgram
from . import local, pullback
from .layout import Layout
from .parameters import Parameters
from .watch import Path, Visit, WatchMode, is_random, outputs

__all__ = ["Changed", "Graph", "Group", "Plan", "Recorder", "Site", "Tail", "signature"]


class Changed(Exception):
    """The program did not do what its plan says; it has to be planned anew."""


def signature(mode: WatchMode, visit: Visit) -> tuple[Any, ...]:
    """What has to be equal for a node to be the same node: all but the numbers, which may be data."""
    variables = tuple((path, t.shape, t.dtype, mode.origin(t)) for path, t in visit.variables)
    parameters = tuple((path, t.shape, t.dtype, mode.number(t)) for path, t in visit.parameters)
    return visit.func, variables, parameters, _settings(visit.args), _settings(tuple(visit.kwargs.values()))


def _settings(values: Any) -> tuple[Any, ...]:
    return tuple(
        _settings(value) if isinstance(value, list | tuple) else None if isinstance(value, Tensor | float) else value
        for value in values
    )


@dataclass(eq=False)
class Node:
    """An operation that depends on parameters."""

    number: int
    func: Any
    key: tuple[Any, ...]
    inputs: list[tuple[Path | None, int]]  # the values that it reads, and where: None if that cannot be told
    parameters: list[Path]
    shape: torch.Size
    device: torch.device
    where: str
    reaches: frozenset[int]  # the parameters that its arguments are, or are made of
    values: list[int] = field(default_factory=list)  # the values that it makes, by output


@dataclass(frozen=True, eq=False)
class Group:
    """Nodes through which one derivative, at the last of them, is pulled back to layers."""

    nodes: tuple[int, ...]  # in order; the derivative is known at the last
    links: dict[int, tuple[tuple[Path, int], ...]]  # of a node: its arguments in the group, and the nodes they are from
    calls: dict[int, tuple[Path, ...]]  # of a node with parameters: where they are


@dataclass(frozen=True, eq=False)
class Tail:
    """The loss alone, from its inputs on: its derivative by them is exact."""

    group: Group
    inputs: dict[int, torch.Size]  # by the node that makes one: its shape


@dataclass(eq=False)
class Site:
    """A place where noise enters."""

    number: int
    group: Group
    shape: torch.Size
    device: torch.device
    where: str  # the layers, with the lines of the program
    layout: Layout | None = None  # None: its samples are coupled
    coupled: bool = False  # whether a probe has seen other samples' losses depend on a sample's entries

    @property
    def end(self) -> int:
        """The node behind which noise enters."""
        return self.group.nodes[-1]


@dataclass(eq=False)
class Plan:
    """All that later calls of a program need to know."""

    keys: list[tuple[Any, ...]]  # of the nodes
    result: tuple[Any, ...]  # the origin of the losses
    sites: list[Site]
    exact: Group | None  # the layers behind which is only the loss
    tail: Tail | None  # None where the loss's derivative by its inputs is not known
    name: str  # of the program, whatever the number of samples: the same in every process
    samples: int
    random: bool  # whether the program draws random numbers
    reached: frozenset[int]  # the parameters that the losses depend on
    writes: bool = False  # whether the program writes to memory from outside
    age: int = 0  # calls since it was made
    due: bool = True  # whether the layouts are to be found, or looked at again
    trace: Trace | None = None  # of the memory of a pass with one tangent, where there is a budget
    ends: dict[int, Site] = field(default_factory=dict)
    member: dict[int, Site] = field(default_factory=dict)

    def is_of(self, other: Plan) -> bool:
        """Whether another plan is of the same program."""
        return (self.keys, self.result, self.samples) == (other.keys, other.result, other.samples)

    def __post_init__(self) -> None:
        self.ends = {site.end: site for site in self.sites}
        self.member = {node: site for site in self.sites for node in site.group.nodes}


class Graph:
    """Who makes and who reads which value. A tensor object is one value, as long as nothing writes to its memory."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.maker: list[int] = []  # by value: the node
        self._known: dict[int, tuple[Any, int, int]] = {}  # by tensor: reference, value, writes at the time
        self._stored: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()  # by storage: values
        self._writes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def values(self, path: Path, tensor: Tensor) -> list[tuple[Path | None, int]]:
        """The values that a tensor holds: one, or, where something was written behind its back, any of its memory's."""
        storage = tensor.untyped_storage()
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[2] == self._writes.get(storage, 0):
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
        storage = tensor.untyped_storage()
        self._writes[storage] = self._writes.get(storage, 0) + 1

    def _know(self, tensor: Tensor, value: int) -> None:
        key = id(tensor)
        self._known[key] = (
            weakref.ref(tensor, lambda _: self._known.pop(key, None)),
            value,
            self._writes.get(tensor.untyped_storage(), 0),
        )


class Recorder:
    """The phase of a pass that plans: values alone."""

    def __init__(self, parameters: Parameters) -> None:
        self.graph = Graph()
        self.random = False
        self._parameters = parameters
        self._sources: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()  # of what is made

    def before(self, mode: WatchMode, visit: Visit) -> None:
        inputs = [one for path, tensor in visit.variables for one in self.graph.values(path, tensor)]
        if visit.parameters:
            local.check(visit.func, ", ".join(self._name(tensor) for _, tensor in visit.parameters))
        where = call_site(str(visit.func)) if visit.parameters else str(visit.func)
        paths = [path for path, _ in visit.parameters]
        reaches = frozenset[int]().union(*(self._source(tensor) for _, tensor in visit.parameters))
        key = signature(mode, visit)
        node = Node(visit.number, visit.func, key, inputs, paths, _NOTHING, _CPU, where, reaches)
        self.graph.nodes.append(node)

    def after(self, mode: WatchMode, visit: Visit, out: Any) -> None:
        node = self.graph.nodes[visit.number]
        tensors = outputs(out)
        variable = [tensor for tensor in tensors if tensor.is_floating_point()]
        if engine_plan(visit.func).writes:
            for tensor in variable:
                self.graph.wrote(tensor)
        if variable:
            first = variable[0]
            node.shape, node.device = first.shape, first.device
        self.graph.enter(node, variable)

    def parametrised(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if is_random(func):
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

    def seen(self, func: Any) -> None:
        self.random = self.random or is_random(func)

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

    def plan(self, mode: WatchMode, losses: Tensor) -> Plan:
        """The plan, with layouts still to be found."""
        builder = _Builder(self.graph, self.graph.values((), losses))
        return builder.plan(losses.shape[0], mode.origin(losses), self.random)


_NOTHING, _CPU = torch.Size([]), torch.device("cpu")


class _Builder:
    """Turns a graph into groups: first the part behind the last layers, then a site for each other layer."""

    def __init__(self, graph: Graph, losses: list[tuple[Path | None, int]]) -> None:
        self._graph = graph
        self._nodes = graph.nodes
        self._losses = {value for _, value in losses}
        self._known_loss = len(losses) == 1 and losses[0][0] is not None
        self._readers: dict[int, list[tuple[int, Path | None]]] = defaultdict(list)  # by value, live ones only
        self._live: set[int] = set()
        self._trace()
        self._exact = self._find_exact() if self._known_loss else set()

    def _trace(self) -> None:
        """Find what the losses depend on; a value that only a metric reads has no readers."""
        wanted = set(self._losses)
        for node in reversed(self._nodes):
            if not wanted.intersection(node.values):
                continue
            self._live.add(node.number)
            for path, value in node.inputs:
                wanted.add(value)
                self._readers[value].append((node.number, path))

    def _only_first(self, node: Node) -> bool:
        """Whether the losses depend on the first output of a node alone."""
        return not any(value in self._losses or self._readers[value] for value in node.values[1:])

    def _find_exact(self) -> set[int]:
        """The values at which the losses' derivative is known: what reads them can be pulled back through."""
        exact: set[int] = set()
        for node in reversed(self._nodes):
            if node.number not in self._live or not node.values or not self._only_first(node):
                continue
            value = node.values[0]
            if all(self._is_exact_reader(reader, path, exact) for reader, path in self._readers[value]):
                exact.add(value)
        return exact

    def _is_exact_reader(self, reader: int, path: Path | None, exact: set[int]) -> bool:
        node = self._nodes[reader]
        return pullback.find(node.func, path) is not None and bool(node.values) and node.values[0] in exact

    # -- groups -----------------------------------------------------------------------------------------------------

    def plan(self, samples: int, result: tuple[Any, ...], random: bool) -> Plan:
        calls = [n for n in self._nodes if n.parameters and n.number in self._live]
        exact = [n.number for n in calls if n.values[0] in self._exact]
        sites: dict[int, dict[int, tuple[int, Path]]] = defaultdict(dict)  # by last node: the steps to it
        for node in calls:
            if node.number not in exact:
                steps = self._chain(node)
                end = steps[-1][1] if steps else node.number
                sites[end].update({first: (then, path) for first, then, path in steps})
        made = [self._site(number, end, sites[end]) for number, end in enumerate(sorted(sites))]
        tail = self._tail()
        return Plan(
            [node.key for node in self._nodes],
            result,
            made,
            self._exact_group(exact) if exact else None,
            tail,
            self._name(made, tail, samples),
            samples,
            random,
            frozenset[int]().union(*(node.reaches for node in calls)),
        )

    def _chain(self, node: Node) -> list[tuple[int, int, Path]]:
        """The small operations behind a layer that are the sole readers of what stands before them."""
        steps: list[tuple[int, int, Path]] = []
        while True:
            readers = self._readers[node.values[0]]
            if len(readers) != 1 or node.values[0] in self._losses or not self._only_first(node):
                break
            number, path = readers[0]
            then, found = self._nodes[number], pullback.find(self._nodes[number].func, path)
            if found is None or found.tail or not then.values or then.shape.numel() > node.shape.numel():
                break
            assert path is not None
            steps.append((node.number, number, path))
            node = then
        while steps and self._is_neutral(steps[-1]):
            steps.pop()
        return steps

    def _is_neutral(self, step: tuple[int, int, Path]) -> bool:
        found = pullback.find(self._nodes[step[1]].func, step[2])
        return found is not None and found.neutral

    def _site(self, number: int, end: int, steps: dict[int, tuple[int, Path]]) -> Site:
        members = tuple(sorted({end, *steps}))
        links: dict[int, list[tuple[Path, int]]] = defaultdict(list)
        for first, (then, path) in steps.items():
            links[then].append((path, first))
        last = self._nodes[end]
        places = [self._nodes[n].where for n in members if self._nodes[n].parameters]
        return Site(number, self._group(members, links), last.shape, last.device, "; ".join(places))

    def _exact_group(self, calls: list[int]) -> Group:
        members: set[int] = set(calls)
        links: dict[int, list[tuple[Path, int]]] = defaultdict(list)
        for node in self._nodes:
            if node.number in members:
                for reader, path in self._readers[node.values[0]]:
                    assert path is not None
                    members.add(reader)
                    links[reader].append((path, node.number))
        return self._group(tuple(sorted(members)), links)

    def _tail(self) -> Tail | None:
        """What stands behind the last values that are made of others at which the derivative is not known."""
        starts: list[int] = []
        inside = self._losses & self._exact
        for node in reversed(self._nodes):
            if not inside.intersection(node.values[:1]) or not node.inputs:
                continue
            if all(value in self._exact for _, value in node.inputs):
                inside.update(value for _, value in node.inputs)
            else:
                starts.append(self._behind_views(node).number)
        if not starts or self._depend_on_each_other(set(starts)):
            return None
        return Tail(self._exact_group(starts), {number: self._nodes[number].shape for number in sorted(starts)})

    def _behind_views(self, node: Node) -> Node:
        """The last of the nodes that only move entries: there the shape tells more of where the samples lie."""
        while node.values[0] not in self._losses:
            readers = self._readers[node.values[0]]
            found = pullback.find(self._nodes[readers[0][0]].func, readers[0][1])
            if len(readers) > 1 or found is None or not found.neutral:
                break
            node = self._nodes[readers[0][0]]
        return node

    def _depend_on_each_other(self, starts: set[int]) -> bool:
        """Whether a tangent would be counted at one of the nodes, and behind it at another."""
        reached: set[int] = set()
        for node in self._nodes:
            behind = any(value in reached for _, value in node.inputs)
            if behind and node.number in starts:
                return True
            if behind or node.number in starts:
                reached.update(node.values)
        return False

    def _name(self, sites: list[Site], tail: Tail | None, samples: int) -> str:
        nodes = [(str(node.func), sorted(node.reaches)) for node in self._nodes if node.number in self._live]
        sizes = [site.shape.numel() / samples for site in sites]
        inputs = [] if tail is None else [shape.numel() / samples for shape in tail.inputs.values()]
        return hashlib.sha256(repr((nodes, sizes, inputs)).encode()).hexdigest()[:16]

    def _group(self, members: tuple[int, ...], links: dict[int, list[tuple[Path, int]]]) -> Group:
        calls = {n: tuple(self._nodes[n].parameters) for n in members if self._nodes[n].parameters}
        return Group(members, {n: tuple(those) for n, those in links.items()}, calls)
