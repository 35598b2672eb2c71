"""From the operations of a program to its plan: where noise enters, and which layers get their gradients from there."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import torch

from ...errors import UnsupportedProgram
from ..adjoints.adjoint import Adjoint, lookup
from ..program.layout import candidates
from ..program.watch import Path
from .cuts import Cut, Links, cuts, entries, members
from .dataflow import Dataflow
from .noise_plan import LayerGroup, Link, Node, NoisePlan, Site, Spread, Tail
from .own_weights import OwnWeights

__all__ = ["Builder"]


class Builder:
    """Turns operations into groups: first the part behind the last layers, then a site for each other layer."""

    def __init__(
        self, nodes: list[Node], losses: list[tuple[Path | None, int]], together: Collection[int] = ()
    ) -> None:
        self._nodes = nodes
        self._together = together  # nodes at whose results samples are known not to be apart
        self._flow = Dataflow(nodes, losses)
        self._calls = [node for node in nodes if node.parameters and node.number in self._flow.live]
        self._exact = [node.number for node in self._calls if self._is_exact(node)]  # calls

    def plan(self, samples: int, result: tuple[Any, ...], random: bool) -> NoisePlan:
        """Of losses that are ``result``, with layouts still to be found."""
        self._samples = samples
        self._refuse_several()
        ends = self._ends([node for node in self._calls if node.number not in self._exact])
        own = {end: members(end, links) for end, links in ends.items()}  # without what others' noise does for
        spread = self._spread(ends, own)
        sites = [self._site(number, own[end], ends[end], samples) for number, end in enumerate(sorted(ends))]
        tail = self._tail()
        return NoisePlan(
            [node.key for node in self._nodes],
            result,
            sites,
            self._exact_group(self._exact) if self._exact else None,
            tail,
            self._name(sites, tail, samples),
            samples,
            random,
            frozenset[int]().union(*(node.reaches for node in self._calls)),
            spread,
            self._norms(sites, samples),
        )

    def _refuse_several(self) -> None:
        """Noise enters at the first result of a layer, and products are of that."""
        for node in (node for node in self._calls if not self._flow.only_first(node)):
            raise UnsupportedProgram(
                f"the losses depend on more than the first result of {node.where}, which has parameters; expected an "
                "operation with one result there."
            )

    # -- layers behind which is only the loss -----------------------------------------------------------------------

    def _is_exact(self, node: Node) -> bool:
        return node.values[0] in self._flow.exact or self._scales_exact(node)

    def _scales_exact(self, node: Node) -> bool:
        """Whether it scales the input of layers behind which is only the loss."""
        if not self._flow.known_loss or not self._only_scales(node):
            return False
        made = [node]
        for one in made:
            for reader, _, found in self._flow.reading(one):
                if self._is_neutral(reader, found):
                    made.append(reader)
                elif not self._is_exact_product(reader, found):
                    return False
        return self._flow.losses.isdisjoint(one.values[0] for one in made)

    def _only_scales(self, node: Node) -> bool:
        # noise behind a batch norm tells its statistics apart
        return lookup(node.func).scales and self._flow.only_first(node) and not (node.batch or node.complex)

    def _is_neutral(self, node: Node, found: Adjoint) -> bool:
        """Whether a node moves entries of an argument, and makes nothing else that is read."""
        return found.neutral and self._flow.only_first(node)

    def _is_exact_product(self, node: Node, found: Adjoint) -> bool:
        return found.weights and self._flow.only_first(node) and node.values[0] in self._flow.exact

    # -- sites ------------------------------------------------------------------------------------------------------

    def _ends(self, calls: list[Node]) -> dict[int, Links]:
        """By the last node of a site: how its layers get there. No node belongs to two sites."""
        owners: dict[int, int] = {}  # by node: the end of its site
        found = {node.number: self._settle(self._chain(node), owners) for node in reversed(calls)}
        for node in calls:
            scales = lookup(node.func).scales and not node.complex
            if found[node.number].node is node and scales and _is_alone(node, owners):
                found[node.number] = self._with_weights(node, owners)
        ends: dict[int, Links] = defaultdict(set)
        for cut in found.values():
            ends[cut.node.number] |= cut.links
        return ends

    def _with_weights(self, node: Node, owners: dict[int, int]) -> Cut:
        """What scales the input of other layers needs no noise of its own: it goes with their weights, if it can."""
        taken = set(owners.values()) - {node.number}
        del owners[node.number]
        behind = [cut for cut in self._cuts(node, weights=True) if cut.node.number in taken]
        return self._settle([*behind[:1], Cut(node, set(), node.shape.numel())], owners)

    def _settle(self, choice: list[Cut], owners: dict[int, int]) -> Cut:
        """The first of the cuts that crosses no other site."""
        for cut in choice:
            end = cut.node.number
            own = members(end, cut.links)
            if all(owners.get(number, end) == end for number in own):
                owners.update(dict.fromkeys(own, end))
                return cut
        raise AssertionError("a layer's own output is always free")

    def _chain(self, node: Node) -> list[Cut]:
        """Where noise may enter, best first: as far as there are no more numbers than at any place before."""
        kept: list[Cut] = []
        fewest, shared = 0.0, False
        for cut in self._cuts(node):
            # where samples share an entry, as of positions (1, T), its noise comes back by the losses of all of them
            shared = self._is_shared(cut.node) or (shared and cut.is_neutral(self._flow))
            numbers = cut.numbers * (self._samples if shared else 1)
            if not kept or numbers <= fewest:
                kept.append(cut)
                fewest = numbers
        while kept[-1].is_neutral(self._flow):
            kept.pop()
        return kept[::-1]

    def _is_shared(self, node: Node) -> bool:
        return node.number in self._together or _looks_shared(node.shape, self._samples)

    def _cuts(self, node: Node, weights: bool = False) -> list[Cut]:
        return cuts(self._flow, node, set(self._exact), weights)

    def _site(self, number: int, numbers: tuple[int, ...], links: Links, samples: int) -> Site:
        last = self._nodes[numbers[-1]]
        layers = [self._nodes[n] for n in numbers if self._nodes[n].parameters]
        places = "; ".join(layer.where for layer in layers)
        own = self._own_weights(layers, numbers, links, samples)
        if own is not None:
            (layer,) = layers
            group, shape = self._group((layer.number,), ()), torch.Size([samples, own.numbers])
            return Site(number, group, shape, layer.device, places, own, numbers=shape.numel())
        site = Site(number, self._group(numbers, links), last.shape, last.device, places, numbers=last.shape.numel())
        if not self._flow.has_batch(numbers):  # noise behind a batch norm tells its statistics apart
            live, site.normed = self._flow.entries_read.get(last.values[0]), self._is_normed(last)
            if live is not None:
                site.numbers, site.live = int(live.expand(last.shape).sum()), live.to(last.device)
        return site

    def _own_weights(
        self, layers: list[Node], numbers: tuple[int, ...], links: Links, samples: int
    ) -> OwnWeights | None:
        """For the only layer of a site, where each sample is a row and can have a weight of its own."""
        if len(layers) != 1 or any(link.source not in numbers for _, link in links):
            return None
        (layer,) = layers
        if layer.shape[:1] != (samples,) or self._flow.has_batch(numbers):
            return None
        return OwnWeights.of(layer.key, layer.shape, self._nodes[numbers[-1]].shape.numel() / samples)

    def _is_normed(self, node: Node) -> bool:
        """Whether a norm of the last axis reads what a node has made, as it is."""
        return any(
            _is_norm(reader, found, path, node.shape)
            or (self._only_moves(reader, found, node) and self._is_normed(reader))
            for reader, path, found in self._flow.reading(node)
        )

    def _only_moves(self, reader: Node, found: Adjoint, node: Node) -> bool:
        """Whether entries of a node's result are moved, and its last axis stays."""
        return self._is_neutral(reader, found) and reader.shape[-1:] == node.shape[-1:]

    def _norms(self, sites: list[Site], samples: int) -> dict[int, Site]:
        """The batch norms that are told apart from other couplings: each sample is a row, and noise enters behind."""
        inside = [(self._nodes[number], site) for site in sites for number in site.group.nodes]
        return {node.number: site for node, site in inside if node.batch and node.shape[0] == samples > 1}

    # -- layers that several sites do for ---------------------------------------------------------------------------

    def _spread(self, ends: dict[int, Links], own: dict[int, tuple[int, ...]]) -> list[Spread]:
        """Take sites away that the noise of later ones can do for: a recurrent network's product with all its inputs.

        All that depends on the output enters, through small operations, what other sites are the ends of.
        """
        made = []
        owners = {node: end for end, numbers in own.items() for node in numbers}
        for end in sorted(ends, reverse=True):
            found = self._entries(end, own[end], owners)
            if found is None:
                continue
            links, entered = found
            links |= ends.pop(end)
            for node in own[end]:
                del owners[node]
            for other, entering in entered.items():
                ends[other] |= entering
            made.append(Spread(self._group(members(end, links), links), max(entered)))
        return made

    def _entries(self, end: int, own: tuple[int, ...], owners: dict[int, int]) -> tuple[Links, dict[int, Links]] | None:
        """What enters other sites from one, where these have no more noise than it."""
        if self._flow.has_batch(own):  # noise from before would not be told apart behind it without noise of its own
            return None
        found = entries(self._flow, self._nodes[end], owners, set(self._exact))
        if found is None or not found[1]:
            return None
        size = sum(self._nodes[other].shape.numel() for other in found[1])
        return found if size <= self._nodes[end].shape.numel() else None

    # -- groups -----------------------------------------------------------------------------------------------------

    def _exact_group(self, calls: list[int]) -> LayerGroup:
        numbers: set[int] = set(calls)
        links: Links = set()
        for node in self._nodes:
            if node.number in numbers:
                for reader, path in self._flow.readers[node.values[0]]:
                    assert path is not None
                    numbers.add(reader)
                    links.add((reader, Link(path, node.number, 0)))
        return self._group(tuple(sorted(numbers)), links)

    def _group(self, numbers: tuple[int, ...], links: Iterable[tuple[int, Link]]) -> LayerGroup:
        calls = {n: tuple(self._nodes[n].parameters) for n in numbers if self._nodes[n].parameters}
        by_node: dict[int, list[Link]] = defaultdict(list)
        for number, link in sorted(links, key=lambda one: (one[0], one[1].source, one[1].output, str(one[1].path))):
            by_node[number].append(link)
        return LayerGroup(numbers, {n: tuple(those) for n, those in by_node.items()}, calls)

    # -- the loss ---------------------------------------------------------------------------------------------------

    def _tail(self) -> Tail | None:
        """What stands behind the last values that are made of others at which the derivative is not known."""
        starts = self._loss_inputs()
        if not starts or self._flow.depend_on_each_other(set(starts)):
            return None
        return Tail(self._exact_group(starts), {number: self._nodes[number].shape for number in sorted(starts)})

    def _loss_inputs(self) -> list[int]:
        starts: list[int] = []
        inside = self._flow.losses & self._flow.exact
        for node in reversed(self._nodes):
            if not inside.intersection(node.values[:1]) or not node.inputs:
                continue
            values = {value for _, value in node.inputs}
            if values <= self._flow.exact:
                inside |= values
            else:
                starts.append(self._flow.behind_views(node).number)
        return starts

    def _name(self, sites: list[Site], tail: Tail | None, samples: int) -> str:
        nodes = [(str(node.func), sorted(node.reaches)) for node in self._nodes if node.number in self._flow.live]
        sizes = [site.shape.numel() / samples for site in sites]
        inputs = [] if tail is None else [shape.numel() / samples for shape in tail.inputs.values()]
        return hashlib.sha256(repr((nodes, sizes, inputs)).encode()).hexdigest()[:16]


def _looks_shared(shape: torch.Size, samples: int) -> bool:
    """Whether no axis, nor the first ones together, look as if they counted the samples."""
    likely = any(one.axis == 0 or shape[one.axis] == samples for one in candidates(shape, samples))
    together = any(math.prod(shape[:axes]) % samples == 0 for axes in range(1, len(shape)))
    return not (likely or together) or (samples > 1 and shape[:1] == (1,))


def _is_alone(node: Node, owners: dict[int, int]) -> bool:
    """Whether a node is its site's only one."""
    return all(owner != node.number or number == node.number for number, owner in owners.items())


def _is_norm(reader: Node, found: Adjoint, path: Path | None, shape: torch.Size) -> bool:
    """Whether it is a norm of the last axis of its first argument, which has this shape."""
    return found.norms_last and path == (0,) and list(reader.key[3][1]) == [*shape[-1:]]
