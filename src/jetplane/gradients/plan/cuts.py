"""From a layer forward: the places that all that depends on its output passes, where noise may enter for it."""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import NamedTuple

import torch

from ..adjoints.adjoint import Adjoint
from ..program.watch import Path
from .dataflow import Dataflow
from .noise_plan import Link, Node

__all__ = ["Cut", "Links", "cuts", "entries", "members"]

_FARTHEST = 64  # operations between a layer and its site
_WIDEST = 10_000  # operations between a layer and all of several sites

Links = set[tuple[int, Link]]  # a node, and an argument of it


class Cut(NamedTuple):
    """A node that all that depends on a layer's output has passed, and how to get there."""

    node: Node
    links: Links
    numbers: float  # of the node's result, those that come from the layer

    def is_neutral(self, flow: Dataflow) -> bool:
        """Whether the last step moved entries, and no more."""
        last = [link for number, link in self.links if number == self.node.number]
        return len(last) == 1 and flow.found(self.node.number, last[0].path).neutral


def members(end: int, links: Links) -> tuple[int, ...]:
    """The nodes of a site, in order."""
    return tuple(sorted({end, *(link.source for _, link in links), *(node for node, _ in links)}))


class _Entry(NamedTuple):
    """An argument of a node that depends on where a walk began."""

    path: Path | None
    value: int
    found: Adjoint  # how to pull back to it

    def passes(self, free: bool = False) -> bool:
        """Whether it is read by a small operation; or, where that is ``free``, by the product of a layer."""
        return self.found.known and not self.found.tail and (free or not self.found.weights)


class _Walk:
    """The values that depend on a node's first output, as far as one has gone."""

    def __init__(self, flow: Dataflow, start: Node) -> None:
        self.flow, self.start = flow, start
        self.inside = {start.values[0]: Link((), start.number, 0)}  # values, and where they come from
        self.links: Links = set()
        self.passed: set[int] = set()

    def entering(self, node: Node) -> list[_Entry]:
        """The arguments of a node that are inside."""
        given = [(path, value) for path, value in node.inputs if value in self.inside]
        return [_Entry(path, value, self.flow.found(node.number, path)) for path, value in given]

    def arguments(self, node: Node, entering: list[_Entry]) -> Links:
        """The same as links."""
        known = [(path, self.inside[value]) for path, value, _ in entering if path is not None]
        return {(node.number, link._replace(path=path)) for path, link in known}

    def goes_on(self, node: Node, entering: list[_Entry]) -> bool:
        """Whether all that a node makes can be followed."""
        return bool(node.values) and (_several(entering) or self.flow.only_first(node))

    def go(self, node: Node, entering: list[_Entry]) -> list[int]:
        """Pass a node. The values that are inside by that."""
        self.passed.add(node.number)
        self.links |= self.arguments(node, entering)
        made = node.values if _several(entering) else node.values[:1]
        self.inside |= {value: Link((), node.number, output) for output, value in enumerate(made)}
        return made


def _several(entering: list[_Entry]) -> bool:
    """Whether a node has several results that are parts of its argument."""
    return any(one.found.parts for one in entering)


# -- places that everything passes ----------------------------------------------------------------------------------


def cuts(flow: Dataflow, start: Node, stops: set[int], weights: bool = False) -> list[Cut]:
    """The nodes that all that depends on ``start`` passes, nearest first, through small operations alone.

    None of ``stops`` is passed. With ``weights`` also the products of layers that read nothing but what ``start`` has
    made.
    """
    found = [Cut(start, set(), start.shape.numel())]
    if not flow.only_first(start):
        return found
    walk = _NarrowWalk(flow, start, weights)
    for _ in range(_FARTHEST):
        node = walk.next()
        if node is None or node.number in stops or walk.is_second_norm(node):
            break
        entering = walk.entering(node)
        if not walk.lets_pass(node, entering):
            break
        walk.go(node, entering)
        if walk.is_cut(node, entering):
            found.append(Cut(node, set(walk.links), node.shape.numel() * walk.shares[node.values[0]]))
    return found


class _NarrowWalk(_Walk):
    """Node by node in their order, with the part of each value that comes from the start."""

    def __init__(self, flow: Dataflow, start: Node, weights: bool) -> None:
        super().__init__(flow, start)
        self.shares = {start.values[0]: 1.0}  # of a value's entries, the part that comes from start
        self._plain = {start.values[0]}  # values that are as start has made them
        self._weights = weights

    def next(self) -> Node | None:
        """The first node that reads what is inside; None at the end, and where a loss is inside."""
        waiting = {reader for value in self.inside for reader, _ in self.flow.readers[value]} - self.passed
        if not waiting or self.flow.losses & self.inside.keys():
            return None
        return self.flow.nodes[min(waiting)]

    def is_second_norm(self, node: Node) -> bool:
        """What is behind a second batch norm says of the first one nothing that is a single sample's."""
        return node.batch and self.flow.has_batch((self.start.number, *self.passed))

    def lets_pass(self, node: Node, entering: list[_Entry]) -> bool:
        """Whether one can be pulled back through all of a node."""
        free = self._plain if self._weights else set()
        return all(one.passes(one.value in free) for one in entering) and self.goes_on(node, entering)

    def go(self, node: Node, entering: list[_Entry]) -> list[int]:
        made = super().go(node, entering)
        self.shares |= dict.fromkeys(node.values, self._share(node, entering))
        (first, *others) = entering
        if not others and first.value in self._plain and first.found.neutral:
            self._plain.add(node.values[0])
        return made

    def _share(self, node: Node, entering: list[_Entry]) -> float:
        if node.func is not torch.ops.aten.cat.default:
            return max(self.shares[one.value] for one in entering)
        given = {path: shape.numel() for path, shape, *_ in node.key[1]}
        return sum(self.shares[one.value] * given[one.path] for one in entering) / node.shape.numel()

    def is_cut(self, node: Node, entering: list[_Entry]) -> bool:
        """Whether nothing but the one result of a node is read later."""
        return self._read_later() == {node.values[0]} and not _several(entering)

    def _read_later(self) -> set[int]:
        readers = self.flow.readers
        return {value for value in self.inside if any(reader not in self.passed for reader, _ in readers[value])}


# -- several sites that do for a layer ------------------------------------------------------------------------------


def entries(
    flow: Dataflow, start: Node, owners: dict[int, int], stops: set[int]
) -> tuple[Links, dict[int, Links]] | None:
    """How ``start``'s output gets to other sites, and by the end of each what enters there; None if not only so.

    ``owners`` has the end of the site of each node of one.
    """
    if not flow.only_first(start) or start.values[0] in flow.losses:
        return None
    walk = _WideWalk(flow, start, owners, stops)
    while walk.waiting:
        node = flow.nodes[heapq.heappop(walk.waiting)]
        if node.number not in walk.passed and not walk.visit(node):
            return None
    return walk.links, walk.entries


class _WideWalk(_Walk):
    """Along all ways, each to the first node that is another site's."""

    def __init__(self, flow: Dataflow, start: Node, owners: dict[int, int], stops: set[int]) -> None:
        super().__init__(flow, start)
        self.waiting = [reader for reader, _ in flow.readers[start.values[0]]]  # a heap
        self.entries = defaultdict[int, Links](set)
        self._owners, self._stops = owners, stops

    def visit(self, node: Node) -> bool:
        """Whether a node is another site's, or a small operation on the way to one."""
        self.passed.add(node.number)
        entering = self.entering(node)
        if not all(one.passes() for one in entering) or len(self.passed) > _WIDEST:
            return False
        if node.number in self._owners:  # nothing of its own site stands behind its end
            self.entries[self._owners[node.number]] |= self.arguments(node, entering)
            return True
        if self._is_end(node) or not self.goes_on(node, entering):
            return False
        self._wait_for(self.go(node, entering))
        return True

    def _wait_for(self, values: list[int]) -> None:
        for value in values:
            for reader, _ in self.flow.readers[value]:
                heapq.heappush(self.waiting, reader)

    def _is_end(self, node: Node) -> bool:
        stops = node.batch or node.number in self._stops or self.flow.losses.intersection(node.values)
        return bool(stops or node.parameters)
