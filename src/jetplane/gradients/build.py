"""From the operations of a program to its plan: where noise enters, and which layers get their gradients from there."""

from __future__ import annotations

import hashlib
import heapq
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from . import local, pullback
from .liveness import live_entries
from .own_weights import OwnWeights
from .plan import Group, Link, Node, Plan, Site, Spread, Tail
from .pullback import Local
from .watch import Path

__all__ = ["Builder"]

_FARTHEST = 64  # operations between a layer and its site
_WIDEST = 10_000  # operations between a layer and all of several sites
_NORMS = {torch.ops.aten.native_layer_norm, torch.ops.aten._fused_rms_norm}

Links = set[tuple[int, Link]]  # a node, and an argument of it


class _Cut(NamedTuple):
    """A node that all that depends on a layer's output has passed, and how to get there."""

    node: Node
    links: Links
    numbers: float  # of the node's result, those that come from the layer


class Builder:
    """Turns operations into groups: first the part behind the last layers, then a site for each other layer."""

    def __init__(self, nodes: list[Node], losses: list[tuple[Path | None, int]]) -> None:
        self._nodes = nodes
        self._losses = {value for _, value in losses}
        self._known_loss = len(losses) == 1 and losses[0][0] is not None
        self._readers: dict[int, list[tuple[int, Path | None]]] = defaultdict(list)  # by value, live ones only
        self._live: set[int] = set()
        self._trace()
        self._exact = self._find_exact() if self._known_loss else set()
        self._entries_read = live_entries(nodes, self._readers, self._losses)
        self._exact_calls: set[int] = set()

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
        node, found = self._nodes[reader], self._found(reader, path)
        known = found is not None and not found.weights and not found.parts and not node.batch
        return known and bool(node.values) and node.values[0] in exact

    def _found(self, number: int, path: Path | None) -> Local | None:
        """How to pull back through a node, if one can."""
        node = self._nodes[number]
        found = None if node.opaque else pullback.find(node.func, path)
        if found is None or (found.apart and node.parameters) or (found.weights and not node.parameters):
            return None
        return found

    # -- the plan ---------------------------------------------------------------------------------------------------

    def plan(self, samples: int, result: tuple[Any, ...], random: bool) -> Plan:
        """Of losses that are ``result``, with layouts still to be found."""
        calls = [n for n in self._nodes if n.parameters and n.number in self._live]
        exact = [n.number for n in calls if n.values[0] in self._exact or self._scales_exact(n)]
        self._exact_calls = set(exact)
        sites = self._ends([node for node in calls if node.number not in exact])
        members = {end: _members(end, links) for end, links in sites.items()}
        spread = self._spread(sites, members)
        made = [self._site(number, members[end], sites[end], samples) for number, end in enumerate(sorted(sites))]
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
            spread,
            self._norms(made, samples),
        )

    def _norms(self, sites: list[Site], samples: int) -> dict[int, Site]:
        """The batch norms that are told apart from other couplings: each sample is a row, and noise enters behind."""
        return {
            number: site
            for site in sites
            for number in site.group.nodes
            if self._nodes[number].batch and self._nodes[number].shape[0] == samples > 1
        }

    def _ends(self, calls: list[Node]) -> dict[int, Links]:
        """By the last node of a site: how its layers get there. No node belongs to two sites."""
        owners: dict[int, int] = {}  # by node: the end of its site
        ends = {node.number: self._settle(self._chain(node), owners) for node in reversed(calls)}
        for (
            node
        ) in calls:  # what scales the input of other layers needs no noise of its own: it goes with their weights
            alone = all(owner != node.number or number == node.number for number, owner in owners.items())
            if ends[node.number].node is node and alone and local.is_scale(node.func):
                taken = set(owners.values()) - {node.number}
                del owners[node.number]
                cuts = [cut for cut in self._cuts(node, weights=True) if cut.node.number in taken]
                ends[node.number] = self._settle([*cuts[:1], _Cut(node, set(), node.shape.numel())], owners)
        sites: dict[int, Links] = defaultdict(set)
        for cut in ends.values():
            sites[cut.node.number] |= cut.links
        return sites

    def _settle(self, cuts: list[_Cut], owners: dict[int, int]) -> _Cut:
        """The first of the cuts that crosses no other site."""
        for cut in cuts:
            members = {cut.node.number} | {link.source for _, link in cut.links} | {number for number, _ in cut.links}
            if all(owners.get(number, cut.node.number) == cut.node.number for number in members):
                owners.update(dict.fromkeys(members, cut.node.number))
                return cut
        raise AssertionError("a layer's own output is always free")

    def _chain(self, node: Node) -> list[_Cut]:
        """Where noise may enter, best first: as far as there are no more numbers than at any place before."""
        kept: list[_Cut] = []
        for cut in self._cuts(node):
            if not kept or cut.numbers <= min(one.numbers for one in kept):
                kept.append(cut)
        while self._is_neutral(kept[-1]):
            kept.pop()
        return kept[::-1]

    def _is_neutral(self, cut: _Cut) -> bool:
        """Whether the last step moved entries, and no more."""
        last = [link for number, link in cut.links if number == cut.node.number]
        found = [self._found(cut.node.number, link.path) for link in last]
        return len(found) == 1 and found[0] is not None and found[0].neutral

    def _cuts(self, start: Node, weights: bool = False) -> list[_Cut]:
        """The nodes that all that depends on ``start`` passes, nearest first, through small operations alone.

        With ``weights`` also through the products of layers that read nothing but what ``start`` has made.
        """
        cuts, links = [_Cut(start, set(), start.shape.numel())], set[tuple[int, Link]]()
        shares = {start.values[0]: 1.0}  # of a value's entries, the part that comes from start
        inside = {start.values[0]: Link((), start.number, 0)}  # values, and where they come from
        plain = {start.values[0]}  # those that are as start has made them
        passed = {start.number}
        if not self._only_first(start):
            return cuts
        for _ in range(_FARTHEST):
            waiting = {reader for value in inside for reader, _ in self._readers[value]} - passed
            if not waiting or self._losses & inside.keys():
                break
            node = self._nodes[min(waiting)]
            if node.number in self._exact_calls:
                break
            if node.batch and any(self._nodes[one].batch for one in passed):
                break  # what is behind a second norm says of the first one nothing that is a single sample's
            entering = [(path, value) for path, value in node.inputs if value in inside]
            found = [self._found(node.number, path) for path, _ in entering]
            free = plain if weights else set()
            if not all(_passes(one, value in free) for one, (_, value) in zip(found, entering, strict=True)):
                break
            several = any(one is not None and one.parts for one in found)
            if not node.values or not (several or self._only_first(node)):
                break
            passed.add(node.number)
            links |= {(node.number, inside[value]._replace(path=path)) for path, value in entering if path is not None}
            made = {value: Link((), node.number, output) for output, value in enumerate(node.values)}
            share = max(shares[value] for _, value in entering)
            if node.func is torch.ops.aten.cat.default:
                given = {path: shape.numel() for path, shape, *_ in node.key[1]}
                share = sum(shares[value] * given[path] for path, value in entering) / node.shape.numel()
            shares |= dict.fromkeys(node.values, share)
            inside |= made if several else {node.values[0]: made[node.values[0]]}
            if len(entering) == 1 and entering[0][1] in plain and found[0] is not None and found[0].neutral:
                plain.add(node.values[0])
            left = {value for value in inside if any(reader not in passed for reader, _ in self._readers[value])}
            if left == {node.values[0]} and not several:
                cuts.append(_Cut(node, set(links), node.shape.numel() * share))
        return cuts

    def _scales_exact(self, node: Node) -> bool:
        """Whether it scales the input of layers behind which is only the loss."""
        if not (self._known_loss and local.is_scale(node.func) and self._only_first(node)) or node.batch:
            return False  # noise behind a batch norm tells its statistics apart
        values = [node.values[0]]
        for value in values:
            for number, path in self._readers[value]:
                reader, found = self._nodes[number], self._found(number, path)
                if found is None or not self._only_first(reader):
                    return False
                if found.neutral:
                    values.append(reader.values[0])
                elif not (found.weights and reader.values[0] in self._exact):
                    return False
        return not self._losses.intersection(values)

    # -- layers that several sites do for --------------------------------------------------------------------------

    def _spread(self, sites: dict[int, Links], members: dict[int, tuple[int, ...]]) -> list[Spread]:
        """Take sites away that the noise of later ones can do for: a recurrent network's product with all its inputs.

        All that depends on the output enters, through small operations, what other sites are the ends of.
        """
        made = []
        owners = {node: end for end in sites for node in members[end]}
        for end in sorted(sites, reverse=True):
            # noise from before would not be told apart behind a batch norm without noise of its own
            found = None if any(self._nodes[n].batch for n in members[end]) else self._entries(self._nodes[end], owners)
            if found is None:
                continue
            links, entries = found
            size = sum(self._nodes[other].shape.numel() for other in entries)
            if not entries or size > self._nodes[end].shape.numel():  # there would be more noise in it, and not less
                continue
            links |= sites.pop(end)
            for node in members[end]:
                del owners[node]
            for other, entering in entries.items():
                sites[other] |= entering
            made.append(Spread(self._group(_members(end, links), links), max(entries)))
        return made

    def _entries(self, start: Node, owners: dict[int, int]) -> tuple[Links, dict[int, Links]] | None:
        """How ``start``'s output gets to other sites, and by the end of each what enters there; None if not only so."""
        inside = {start.values[0]: Link((), start.number, 0)}
        links, entries = set[tuple[int, Link]](), defaultdict[int, Links](set)
        waiting = [reader for reader, _ in self._readers[start.values[0]]]
        passed: set[int] = set()
        if not self._only_first(start) or start.values[0] in self._losses:
            return None
        while waiting:
            node = self._nodes[heapq.heappop(waiting)]
            if node.number in passed:
                continue
            passed.add(node.number)
            entering = [(path, value) for path, value in node.inputs if value in inside]
            found = [self._found(node.number, path) for path, _ in entering]
            if not all(_passes(one, False) for one in found) or len(passed) > _WIDEST:
                return None
            here = {(node.number, inside[value]._replace(path=path)) for path, value in entering if path is not None}
            if node.number in owners:  # another's: nothing of its own site stands behind its end
                entries[owners[node.number]] |= here
                continue
            several = any(one is not None and one.parts for one in found)
            stops = node.batch or node.number in self._exact_calls or self._losses.intersection(node.values)
            if stops or node.parameters or not node.values or not (several or self._only_first(node)):
                return None
            links |= here
            for output, value in enumerate(node.values if several else node.values[:1]):
                inside[value] = Link((), node.number, output)
                for reader, _ in self._readers[value]:
                    heapq.heappush(waiting, reader)
        return links, entries

    # -- groups -----------------------------------------------------------------------------------------------------

    def _site(self, number: int, members: tuple[int, ...], links: Links, samples: int) -> Site:
        last = self._nodes[members[-1]]
        layers = [self._nodes[n] for n in members if self._nodes[n].parameters]
        places = "; ".join(layer.where for layer in layers)
        alone = len(layers) == 1 and all(link.source in members for _, link in links)
        if alone and layers[0].shape[:1] == (samples,) and not any(self._nodes[n].batch for n in members):
            (layer,) = layers
            own = OwnWeights.of(layer.key, layer.shape, last.shape.numel() / samples)
            if own is not None:
                group, shape = self._group((layer.number,), ()), torch.Size([samples, own.numbers])
                return Site(number, group, shape, layer.device, places, own, numbers=shape.numel())
        site = Site(number, self._group(members, links), last.shape, last.device, places, numbers=last.shape.numel())
        if not any(self._nodes[n].batch for n in members):  # noise behind a batch norm tells its statistics apart
            live, site.normed = self._entries_read.get(last.values[0]), self._is_normed(last)
            if live is not None:
                site.numbers, site.live = int(live.expand(last.shape).sum()), live.to(last.device)
        return site

    def _is_normed(self, node: Node) -> bool:
        """Whether a norm of the last axis reads what a node has made, as it is."""
        for number, path in self._readers[node.values[0]]:
            reader, found = self._nodes[number], self._found(number, path)
            if reader.func.overloadpacket in _NORMS and path == (0,) and list(reader.key[3][1]) == [*node.shape[-1:]]:
                return True
            moved = found is not None and found.neutral and reader.shape[-1:] == node.shape[-1:]
            if moved and self._only_first(reader) and self._is_normed(reader):
                return True
        return False

    def _exact_group(self, calls: list[int]) -> Group:
        members: set[int] = set(calls)
        links: Links = set()
        for node in self._nodes:
            if node.number in members:
                for reader, path in self._readers[node.values[0]]:
                    assert path is not None
                    members.add(reader)
                    links.add((reader, Link(path, node.number, 0)))
        return self._group(tuple(sorted(members)), links)

    def _group(self, members: tuple[int, ...], links: Iterable[tuple[int, Link]]) -> Group:
        calls = {n: tuple(self._nodes[n].parameters) for n in members if self._nodes[n].parameters}
        by_node: dict[int, list[Link]] = defaultdict(list)
        for number, link in sorted(links, key=lambda one: (one[0], one[1].source, one[1].output, str(one[1].path))):
            by_node[number].append(link)
        return Group(members, {n: tuple(those) for n, those in by_node.items()}, calls)

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


def _members(end: int, links: Links) -> tuple[int, ...]:
    return tuple(sorted({end, *(link.source for _, link in links), *(node for node, _ in links)}))


def _passes(found: Local | None, plain: bool) -> bool:
    return found is not None and not found.tail and (plain or not found.weights)
