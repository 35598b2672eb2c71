"""The plan of a program: its nodes, where noise enters, and through what it is pulled back to the layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ad.run.budget import Trace
from ..adjoints.adjoint import is_opaque
from ..program.layout import Grid, Layout
from ..program.watch import Path, Visit, WatchMode
from .own_weights import OwnWeights

__all__ = ["Changed", "LayerGroup", "Link", "Node", "NoisePlan", "Site", "Spread", "Tail", "Tokens", "signature"]

_SMALL = 64 << 20  # bytes that are worth no pass
_DATA, _SEVERAL = (Tensor, float), (list, tuple)
FEWEST, MOST = 8, 32  # tangents J of a sample where none are asked for: a multiple of the first, up to the second


class Changed(Exception):
    """The program did not do what its plan says; it has to be planned anew."""


def signature(mode: WatchMode, visit: Visit) -> tuple[Any, ...]:
    """What has to be equal for a node to be the same node: all but the numbers, which may be data."""
    # lists, for the frames of generators would take as long as all else: this is asked of each node in each pass
    variables = tuple([(path, t.shape, t.dtype, mode.origin(t)) for path, t in visit.variables])
    parameters = (
        tuple([(path, t.shape, t.dtype, mode.number(t)) for path, t in visit.parameters]) if visit.parameters else ()
    )
    settings = _settings(visit.args), _settings(visit.kwargs.values()) if visit.kwargs else ()
    return visit.func, variables, parameters, *settings, is_opaque(visit.func, visit.args, visit.kwargs)


def _settings(values: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, _DATA):
            found.append(None)
        else:
            found.append(_settings(value) if isinstance(value, _SEVERAL) else value)
    return tuple(found)


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
    opaque: bool  # cannot be pulled back through
    batch: bool  # normalises by statistics of the batch
    complex: bool  # reads or makes complex numbers, of which no adjoint knows: noise is two numbers for each
    values: list[int] = field(default_factory=list)  # the values that it makes, by output


class Link(NamedTuple):
    """An argument of a node that is a result of another one."""

    path: Path
    source: int  # the node
    output: int  # which of its results


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """Nodes through which one derivative, at the last of them, is pulled back to layers."""

    nodes: tuple[int, ...]  # in order; the derivative is known at the last
    links: dict[int, tuple[Link, ...]]  # of a node: its arguments in the group
    calls: dict[int, tuple[Path, ...]]  # of a node with parameters: where they are


@dataclass(frozen=True, eq=False)
class Spread:
    """Layers whose output is read on the way to several sites, whose noise does for them as well."""

    group: LayerGroup
    last: int  # the last node behind which there is such a site


@dataclass(frozen=True, eq=False)
class Tail:
    """The loss alone, from its inputs on: its derivative by them is exact."""

    group: LayerGroup
    inputs: dict[int, torch.Size]  # by the node that makes one: its shape


@dataclass(eq=False)
class Site:
    """A place where noise enters."""

    number: int
    group: LayerGroup
    shape: torch.Size
    device: torch.device
    where: str  # the layers, with the lines of the program
    own: OwnWeights | None = None  # the noise is in each sample's own weight, (B, n)
    live: Tensor | None = None  # broadcasts to the shape: where the losses can depend on it; None: everywhere
    numbers: int = 0  # of noise
    normed: bool = False  # a norm of the last axis reads it, so its derivative is the longer the shorter it is
    layout: Layout | None = None  # None: its samples are coupled
    coupled: bool = False  # whether other samples' losses depend on a sample's entries, there or at its layers
    tokens: Layout | None = None  # where the tokens of the loss's input lie here, too
    reach: Tensor | None = None  # (T or 1, T): whether a token of it, or all of it, reaches a token; None: may be any
    end: int = field(init=False)  # the node behind which noise enters

    def __post_init__(self) -> None:
        self.end = self.group.nodes[-1]


@dataclass(frozen=True, eq=False)
class Tokens:
    """The loss's input by sample and token: any axis of it will do, for its derivative is exact."""

    count: int  # T
    grid: Grid
    node: int  # that makes it


@dataclass(eq=False)
class NoisePlan:
    """All that later calls of a program need to know."""

    keys: list[tuple[Any, ...]]  # of the nodes
    result: tuple[Any, ...]  # the origin of the losses
    sites: list[Site]
    exact: LayerGroup | None  # the layers behind which is only the loss
    tail: Tail | None  # None where the loss's derivative by its inputs is not known
    name: str  # of the program, whatever the number of samples: the same in every process
    samples: int
    random: bool  # whether the program draws random numbers
    reached: frozenset[int]  # the parameters that the losses depend on
    spread: list[Spread]
    norms: dict[int, Site]  # by node: batch norms whose statistics tangents do not pass, and the noise behind them
    tokens: Tokens | None = None  # where sites reach only some of them
    writes: bool = False  # whether the program writes to memory from outside
    age: int = 0  # calls since it was made
    due: bool = True  # whether the layouts are to be found, or looked at again
    noisy: bool = False  # whether it was said that its estimates are mostly noise
    whole: int | None = None  # samples of the batch that these are a part of, in the call at hand; None: it is all
    values: int = 0  # bytes of all that depends on parameters
    layers: int = 0  # of these, what layers give
    resampled: tuple[
        int, ...
    ] = ()  # places in the batch of what has an entry for each sample, if it may be drawn again
    trace: Trace | None = None  # of the memory of a pass with one tangent, where that may be more than there is
    ends: dict[int, Site] = field(default_factory=dict)
    member: dict[int, Site] = field(default_factory=dict)

    @property
    def tangents(self) -> int:
        """How many of them a sample should have: a batch as many as a sample has numbers of noise, from 8 to 32.

        The bounds are those of what was tried: docs/forward-only.md.
        """
        return self.tangents_for(self.numbers, self.samples)

    @staticmethod
    def tangents_for(numbers: int, samples: int) -> int:
        """The same for a batch with so many numbers of noise."""
        return min(max(FEWEST * math.ceil(numbers / samples / samples / FEWEST), FEWEST), MOST)

    @property
    def budget(self) -> int:
        """Bytes for a pass where no others are given: what backprop keeps with a checkpoint for every second layer."""
        return max(_SMALL, self.layers // 2)

    @property
    def numbers(self) -> int:
        """How many numbers of noise there are."""
        return sum(site.numbers for site in self.sites)

    @property
    def apart(self) -> bool:
        """Whether samples depend on nothing of each other, as far as it is known: layouts may still be to be found."""
        told = self.due or all(site.layout is not None and not site.coupled for site in self.sites)
        return told and not self.norms and not self.writes

    @property
    def total(self) -> int:
        """The samples whose mean loss is wanted: these, or those of the whole batch."""
        return self.samples if self.whole is None else self.whole

    def is_of(self, other: NoisePlan) -> bool:
        """Whether another plan is of the same program."""
        return (self.keys, self.result, self.samples) == (other.keys, other.result, other.samples)

    def __post_init__(self) -> None:
        self.ends = {site.end: site for site in self.sites}
        self.member = {node: site for site in self.sites for node in site.group.nodes}
