"""Who reads which value of a program that was recorded, and where the losses' derivative is known."""

from __future__ import annotations

from collections import defaultdict

from ..adjoints.adjoint import UNKNOWN, Adjoint, find
from ..program.watch import Path
from .liveness import live_entries
from .noise_plan import Node

__all__ = ["Dataflow"]


class Dataflow:
    """The values that the losses depend on, from the nodes that make them to those that read them."""

    def __init__(self, nodes: list[Node], losses: list[tuple[Path | None, int]]) -> None:
        self.nodes = nodes
        self.losses = {value for _, value in losses}
        self.known_loss = len(losses) == 1 and losses[0][0] is not None
        self.readers: dict[int, list[tuple[int, Path | None]]] = defaultdict(list)  # by value, live ones only
        self.live: set[int] = set()  # nodes
        self._trace()
        self.exact = self._find_exact() if self.known_loss else set()  # values at which the derivative is known
        self.entries_read = live_entries(nodes, self.readers, self.losses)

    def _trace(self) -> None:
        """Find what the losses depend on; a value that only a metric reads has no readers."""
        wanted = set(self.losses)
        for node in reversed(self.nodes):
            if not wanted.intersection(node.values):
                continue
            self.live.add(node.number)
            for path, value in node.inputs:
                wanted.add(value)
                self.readers[value].append((node.number, path))

    def _find_exact(self) -> set[int]:
        """The values at which the losses' derivative is known: what reads them can be pulled back through."""
        exact: set[int] = set()
        for node in reversed(self.nodes):
            if node.number not in self.live or not node.values or not self.only_first(node):
                continue
            value = node.values[0]
            if all(self._is_exact_reader(reader, path, exact) for reader, path in self.readers[value]):
                exact.add(value)
        return exact

    def _is_exact_reader(self, reader: int, path: Path | None, exact: set[int]) -> bool:
        node, found = self.nodes[reader], self.found(reader, path)
        known = found.known and not found.weights and not found.parts and not node.batch
        return known and bool(node.values) and node.values[0] in exact

    def only_first(self, node: Node) -> bool:
        """Whether the losses depend on the first output of a node alone."""
        return not any(value in self.losses or self.readers[value] for value in node.values[1:])

    def found(self, number: int, path: Path | None) -> Adjoint:
        """How to pull back through a node, if one can."""
        node = self.nodes[number]
        found = UNKNOWN if node.opaque else find(node.func, path)
        stops = found.apart if node.parameters else found.weights
        return UNKNOWN if stops else found

    def reading(self, node: Node) -> list[tuple[Node, Path | None, Adjoint]]:
        """The nodes that read what a node has made, where they do, and how to pull back through them."""
        return [(self.nodes[n], path, self.found(n, path)) for n, path in self.readers[node.values[0]]]

    def has_batch(self, numbers: tuple[int, ...]) -> bool:
        """Whether some of these nodes normalise by statistics of the batch."""
        return any(self.nodes[number].batch for number in numbers)

    def behind_views(self, node: Node) -> Node:
        """The last of the nodes that only move entries: there the shape tells more of where the samples lie."""
        while node.values[0] not in self.losses:
            readers = self.readers[node.values[0]]
            found = find(self.nodes[readers[0][0]].func, readers[0][1])
            if len(readers) > 1 or not found.neutral or self.nodes[readers[0][0]].complex:
                break
            node = self.nodes[readers[0][0]]
        return node

    def depend_on_each_other(self, starts: set[int]) -> bool:
        """Whether a tangent would be counted at one of the nodes, and behind it at another."""
        reached: set[int] = set()
        for node in self.nodes:
            behind = any(value in reached for _, value in node.inputs)
            if behind and node.number in starts:
                return True
            if behind or node.number in starts:
                reached.update(node.values)
        return False
