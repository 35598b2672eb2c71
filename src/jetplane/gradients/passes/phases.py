"""The two passes: noise enters in the first, and the second turns what came of it into gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ...ad.algebra.registry import Kind, derived
from ...ad.storage_geometry import version_of
from ...errors import UnsupportedProgram
from ..adjoints import default
from ..adjoints.adjoint import INPUTS, RESULT, Adjoint, find, lookup
from ..noise.noise_shape import NoiseShape
from ..noise.prediction import NOTHING, NoPrediction, Prediction
from ..noise.readout import Readout
from ..noise.signs import Noise
from ..noise.statistics import Statistics
from ..plan.noise_plan import Changed, LayerGroup, Link, NoisePlan, Site, signature
from ..plan.own_weights import OwnWeights
from ..program.done import Done
from ..program.layout import Grid
from ..program.parameters import Gradients
from ..program.watch import Path, Visit, WatchMode, as_real, at, replaced
from ..program.writes import Writes

__all__ = ["Collector", "Injector"]


class Sequencing(Protocol):
    """Told of what is done, where a compiler is to keep the order: later noise and later layers wait for it."""

    def then(self, tensor: Tensor) -> None: ...
    def hold_back(self, tensor: Tensor) -> None: ...


class _AsItIs:
    def then(self, tensor: Tensor) -> None: ...
    def hold_back(self, tensor: Tensor) -> None: ...


AS_IT_IS: Sequencing = _AsItIs()
Rows = Callable[[Site, Tensor], Tensor | None]  # of a site and its activation: tangents (K, *S)
Quiet = Callable[[], AbstractContextManager[None]]
Deltas = dict[tuple[int, int], Tensor]  # by node and output: the derivative there


class _Follower:
    """A phase that follows a plan: every node must be the one that was planned."""

    def __init__(self, plan: NoisePlan, shapes: dict[int, Tensor] | None, order: Sequencing) -> None:
        self._plan = plan
        self._shapes = {} if shapes is None else shapes  # by site, of noise in samples' own weights
        self._order = order
        self._before: dict[int, tuple[Any, Any]] = {}  # arguments of a node in hand, as they are before a write
        self._alive: dict[int, Tensor | None] = {}  # by node: where a site's layers reach its result
        self._held: dict[int, tuple[Done, list[Tensor]]] = {}  # with the tensors that will be read
        self._versions: dict[int, list[tuple[int, int]]] = {}  # theirs, and how many writes were seen
        self._writes = Writes()
        self._new: int | None = None  # node that is held, its versions not taken yet

    def before(self, mode: WatchMode, visit: Visit) -> None:
        number, keys = visit.number, self._plan.keys
        if number >= len(keys) or keys[number] != signature(mode, visit):
            raise Changed
        for tensor in visit.written:
            self._writes.note(tensor)
        if self._follows(number):
            self._before = {number: self._arguments(visit)}

    def _follows(self, number: int) -> bool:
        raise NotImplementedError

    def _arguments(self, visit: Visit) -> tuple[Any, Any]:
        """The arguments; what the operation is about to overwrite, and is needed later, as a copy."""
        if visit.step.kind is not Kind.INPLACE:
            return visit.args, visit.kwargs
        path: Path = (0,)
        found = find(visit.func, path)
        if found.known and INPUTS not in found.reads:
            return visit.args, visit.kwargs
        return replaced(path, visit.args, visit.kwargs, visit.args[0].clone())

    def _done(self, visit: Visit, out: Any) -> Done:
        return Done(visit.functional, *self._before.pop(visit.number), out)

    def _mask(self, group: LayerGroup, number: int, done: Done) -> Tensor | None:
        """Where the layers of a site reach the result of one of its nodes; None for everywhere."""
        alive = None if number in group.calls else self._mask_of_arguments(group, number, done)
        self._alive[number] = alive
        if number == group.nodes[-1]:
            for one in group.nodes:
                self._alive.pop(one, None)
        return alive

    def _mask_of_arguments(self, group: LayerGroup, number: int, done: Done) -> Tensor | None:
        masks = [
            found.alive(self._alive.get(link.source), done, link.path)  # of no node of it: everywhere
            for link, found in _rules(done.func, group.links.get(number, ()))
        ]
        known = [mask for mask in masks if mask is not None]
        if len(known) < len(masks):
            return None
        return torch.stack(known).any(0) if len(known) > 1 else known[0]

    def _wait(self, result: Tensor) -> None:
        """Let what reads a site's result wait for what was done there."""
        if not self._plan.spread:  # whose layers are held for several sites, and must not be written meanwhile
            self._order.hold_back(result)

    def _shape_of(self, site: int, own: OwnWeights, done: Done) -> Tensor:
        """That of noise in samples' own weights: the same in all runs, which have the same input."""
        if site not in self._shapes:
            self._shapes[site] = own.shape(done)
        return self._shapes[site]

    # -- pulling back -----------------------------------------------------------------------------------------------

    def _hold(self, group: LayerGroup, number: int, done: Done) -> None:
        self._held[number], self._new = (done, _read_later(group, number, done)), number

    def _pull(self, group: LayerGroup, deltas: Deltas, first: int | None = None) -> Iterator[tuple[int, Done, Tensor]]:
        """Each node of a group, from the last one to the first, with the derivative at its result.

        ``deltas`` are those that are known, and at the end those at results of other groups. With ``first`` no further
        than that node, and what is held stays.
        """
        for number in reversed(group.nodes):
            done, watched = self._held[number]
            self._refuse_overwritten(done, watched, self._versions.get(number, []))
            if first is None:
                self._let_go(number)
            rules = _rules(done.func, group.links.get(number, ()))
            if any(found.parts for _, found in rules):
                here: Any = [deltas.pop((number, output), None) for output in range(len(done.out))]
            else:
                here = deltas.pop((number, 0))
                yield number, done, here
            if number == first:
                return
            for link, found in rules:
                assert found.pull is not None
                _add(deltas, (link.source, link.output), found.pull(here, done, link.path))

    def _let_go(self, number: int) -> None:
        self._held.pop(number, None)
        self._versions.pop(number, None)

    def parametrised(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        pass

    def same(self, tensor: Tensor, other: Tensor) -> None:
        pass

    def wrote(self, tensor: Tensor) -> None:
        self._writes.note(tensor)

    def _refuse_overwritten(self, done: Done, tensors: list[Tensor], versions: list[tuple[int, int]]) -> None:
        for tensor, (version, count) in zip(tensors, versions, strict=False):
            # a version is that of all views of a memory, and tells more than was seen to be written
            seen = self._writes.count(tensor) > count and not self._writes.touched(tensor, count)
            if version_of(tensor) != version and not seen:
                raise UnsupportedProgram(
                    f"the {tuple(tensor.shape)} that {done.func} read or made was overwritten before its gradient was "
                    "formed; expected an operation that does not write in place there."
                )

    def seen(self, func: Any, args: Any, kwargs: Any) -> None:
        """The next operation begins. Torch counts a write after the one that makes it has returned: so only now."""
        if self._new is not None and self._new in self._held:
            tensors = self._held[self._new][1]
            self._versions[self._new] = [(version_of(tensor), self._writes.count(tensor)) for tensor in tensors]
        self._new = None


class Injector(_Follower):
    """The first pass: tangents enter at the sites. What they will do is predicted, where that was learned."""

    def __init__(
        self,
        plan: NoisePlan,
        rows: Rows,
        quiet: Quiet,
        masked: bool = True,
        readout: Readout | None = None,
        prediction: Prediction | NoPrediction = NOTHING,
        statistics: Statistics | None = None,
        shapes: dict[int, Tensor] | None = None,
        order: Sequencing = AS_IT_IS,
    ) -> None:
        super().__init__(plan, shapes, order)
        self._rows = rows
        self._quiet = quiet  # around what is no part of the program
        self._masked = masked  # zero where the site's own functions have no derivative
        self._readout, self._prediction, self._statistics = readout, prediction, statistics
        self._norms: dict[int, list[int]] = {}  # by site: those that it is the noise behind
        for number, site in sorted(plan.norms.items()) if statistics is not None else ():
            self._norms.setdefault(site.number, []).append(number)
        self._tail = plan.tail if readout is not None else None
        self._nodes = set() if self._tail is None else set(self._tail.group.nodes)
        self._reached: dict[int, Tensor | None] = {}  # the tangents of the loss's inputs

    def _follows(self, number: int) -> bool:
        return number in self._plan.member or number in self._nodes

    def after(self, mode: WatchMode, visit: Visit, out: Any) -> None:
        site = self._plan.member.get(visit.number)
        if site is not None:
            self._enter(mode, site, visit, out)
        elif visit.number in self._nodes:
            self._approach(mode, visit, out)

    def _enter(self, mode: WatchMode, site: Site, visit: Visit, out: Any) -> None:
        done, norms = self._done(visit, out), self._norms.get(site.number, [])
        if visit.number in norms:
            self._fix(mode, visit.number, done)
        if norms and visit.number >= norms[0]:
            self._hold(site.group, visit.number, done)
        arrived = mode.jet(done.result).tangent if visit.number == site.end else None
        with mode.above(), self._quiet():
            alive = self._mask(site.group, visit.number, done) if self._masked else None
            if arrived is not None:
                self._order.then(arrived)
            rows = self._tangents(site, done, alive) if visit.number == site.end else None
        if rows is not None:
            mode.inject(done.result, _as_result(rows, done))
            with mode.above(), self._quiet():
                self._order.then(rows)
                self._wait(done.result)

    def _tangents(self, site: Site, done: Done, alive: Tensor | None) -> Tensor | None:
        """The noise of a site, in its shape, as tangents (K, *S) of the result at its end."""
        activation = _noisy(site, done)
        if activation.shape != site.shape:  # of a layer that reads data alone, no key has the size of the batch
            raise Changed
        white = self._rows(site, activation)
        length = self._prediction.length(site)
        shape = NoiseShape.of(site, activation, length, alive) if self._masked else NoiseShape(length)
        if site.number in self._norms:
            self._read(site, activation, None if white is None else shape.undo(white))
        if white is None:
            return None
        rows = shape.apply(white)
        self._prediction.carry(site, rows)
        return rows if site.own is None else site.own.apply(done, rows, self._shape_of(site.number, site.own, done))

    def _fix(self, mode: WatchMode, number: int, done: Done) -> None:
        """Let tangents pass a batch norm as if its statistics were fixed."""
        assert self._statistics is not None
        rows = mode.jet(done.args[0]).tangent
        with mode.above(), self._quiet():
            fixed = self._statistics.enter(number, done, rows, mode.pairs.k)
        if fixed is not None:
            mode.replace(done.result, fixed)

    def _read(self, site: Site, activation: Tensor, rows: Tensor | None) -> None:
        """Take the noise of a site, its shape undone, back to the norms before it; and what is predicted there."""
        assert self._statistics is not None
        predicted = self._statistics.predicted(site, activation)
        if predicted is not None:
            for number, pulled in self._at_norms(site, predicted).items():
                self._statistics.know(number, self._held[number][0], pulled)
        found = {} if rows is None else self._at_norms(site, rows)
        for number in self._norms[site.number]:
            self._statistics.read(number, self._held[number][0], found.get(number))
        for number in site.group.nodes:
            self._let_go(number)

    def _at_norms(self, site: Site, rows: Tensor) -> dict[int, list[Tensor]]:
        """Derivatives (K, *S) at the end of a site, pulled back to the results of its norms, one by one."""
        norms = self._norms[site.number]
        found: dict[int, list[Tensor]] = {number: [] for number in norms}
        for row in rows:
            for number, _, here in self._pull(site.group, _at_end(site.group, row), norms[0]):
                if number in found:
                    found[number].append(here)
        return found

    def _approach(self, mode: WatchMode, visit: Visit, out: Any) -> None:
        assert self._tail is not None and self._readout is not None
        done = self._done(visit, out)
        if visit.number in self._tail.inputs:
            self._reached[visit.number] = mode.jet(done.result).tangent
        if not self._readout.has_slopes:
            self._hold(self._tail.group, visit.number, done)

    def finish(self, losses: Tensor, k: int, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The tangents of the loss's input (K, B, T, V), if they were looked at, and what was predicted of them.

        With ``weights`` (B,) the derivative by it is that of so many times each sample's loss.
        """
        if self._readout is None:
            return losses, None
        assert self._tail is not None
        if not self._readout.has_slopes:
            pulled = self._pull(self._tail.group, _at_end(self._tail.group, _of_each(losses, 1.0, weights)))
            self._readout.take({number: here for number, _, here in pulled if number in self._tail.inputs})
        tangents = self._readout.rows(self._reached, k)
        return tangents, self._prediction.close(tangents)


class Collector(_Follower):
    """The second pass: the same noise, weighted by what it did to the losses, gives each layer its derivative."""

    def __init__(
        self,
        plan: NoisePlan,
        gradients: Gradients,
        noise: Noise,
        scalars: Tensor | None,
        chunk: int,
        prediction: Prediction | NoPrediction = NOTHING,
        statistics: Statistics | None = None,
        shapes: dict[int, Tensor] | None = None,
        order: Sequencing = AS_IT_IS,
    ) -> None:
        super().__init__(plan, shapes, order)
        self._gradients = gradients
        self._noise = noise
        self._scalars = scalars  # (J, B, T), over J and B
        self._chunk = chunk
        self._prediction, self._statistics = prediction, statistics
        self._exact = set() if plan.exact is None else set(plan.exact.nodes)
        self._spread = {number: one.group for one in plan.spread for number in one.group.nodes}
        self._pending: Deltas = {}  # at results of theirs, from the sites so far

    def parametrised(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self._gradients.record(func, args, kwargs, out)

    def _follows(self, number: int) -> bool:
        return number in self._plan.member or number in self._exact or number in self._spread

    def after(self, mode: WatchMode, visit: Visit, out: Any) -> None:
        number = visit.number
        if not self._follows(number):
            return
        done = self._done(visit, out)
        site = self._plan.member.get(number)
        group = self._spread.get(number, self._plan.exact) if site is None else site.group
        assert group is not None
        self._hold(group, number, done)
        if site is not None:
            self._inside(mode, site, number, done)

    def _inside(self, mode: WatchMode, site: Site, number: int, done: Done) -> None:
        """At a node of a site."""
        learns = site.number in self._prediction.sites
        if not learns and number != site.end:
            return
        with mode.above():
            alive = self._mask(site.group, number, done) if learns else None
            if number == site.end:
                self._leave(site, done, alive)

    def _leave(self, site: Site, done: Done, alive: Tensor | None) -> None:
        """At the end of a site: its derivative, and what follows from it for the layers."""
        delta = self._delta(site, _noisy(site, done), alive)
        if site.own is None:
            self._collect(site.group, _at_end(site.group, _as_result(delta, done)))
        else:
            self._let_go(site.end)
            for path, gradient in site.own.undo(delta, self._shape_of(site.number, site.own, done)).items():
                self._gradients.add(at(path, done.args, done.kwargs), gradient)
                self._order.then(gradient)
        for one in self._plan.spread:
            if one.last == site.end:
                self._collect(one.group, self._pending)
        self._wait(done.result)

    def finish(self, losses: Tensor, weights: Tensor | None = None) -> None:
        """The part behind the last layers, whose derivative is exact; and the parametrisations."""
        if self._plan.exact is not None:
            slope = _of_each(losses, 1 / self._plan.total, weights)
            self._collect(self._plan.exact, _at_end(self._plan.exact, slope))
        self._gradients.finish()

    def _collect(self, group: LayerGroup, deltas: Deltas) -> None:
        """Take the derivatives that are known in a group back to its layers, and do their products."""
        for number, done, here in self._pull(group, deltas):
            for path in group.calls.get(number, ()):
                product = default.product(here, done, path)
                self._gradients.add(at(path, done.args, done.kwargs), product)
                self._order.then(product)
        if deltas is not self._pending:
            for key, part in deltas.items():
                _add(self._pending, key, part)

    def _delta(self, site: Site, activation: Tensor, alive: Tensor | None) -> Tensor:
        """mean_j s_jb u_jb / B, the estimate of the derivative of the mean loss at an activation."""
        prediction, numbers = self._prediction, self._numbers(site)
        prediction.wait(self._order.hold_back)
        known = prediction.restored(site, activation)  # before it learns
        shape = NoiseShape.of(site, activation, prediction.length(site), alive)
        pattern = shape.pattern(activation) if site.number in prediction.sites else None
        total: Tensor | None = None  # one sum and not all its terms: they are as large as the activation
        for start in range(0, len(numbers), self._chunk):
            some = numbers[start : start + self._chunk]
            rows = self._noise.rows(site.number, start, start + len(some), activation)
            part = _weighted(site, rows, some.to(rows.dtype))
            total = part if total is None else total + part
            prediction.learn(site, rows, pattern, start)
        assert total is not None
        prediction.weigh(site, total, known, numbers, pattern)
        return shape.undo(total, known)

    def _numbers(self, site: Site) -> Tensor:
        """(J, B, C): what multiplies the noise of each sample and token of a site, over J and B."""
        assert self._scalars is not None
        numbers = _multipliers(site, self._scalars)
        missing = None if self._statistics is None else self._statistics.missing(site)
        if missing is None:
            return numbers
        return numbers + (missing.sum(1, keepdim=True) if site.layout is None else missing).unsqueeze(2)


def _add(deltas: Deltas, place: tuple[int, int], part: Tensor) -> None:
    """A derivative has another part."""
    deltas[place] = deltas[place] + part if place in deltas else part


def _of_each(losses: Tensor, value: float, weights: Tensor | None) -> Tensor:
    """The derivative of the losses' sum by each of them, times a number, and the weight of its sample."""
    slopes = torch.full_like(losses, value)
    if weights is None:
        return slopes
    return slopes * weights.to(slopes).reshape(-1, *(1,) * (losses.ndim - 1))


def _noisy(site: Site, done: Done) -> Tensor:
    """What the noise of a site is added to, or a tensor of its shape: the activation, or each sample's own weight."""
    return as_real(done.result) if site.own is None else site.own.like(done)


def _as_result(numbers: Tensor, done: Done) -> Tensor:
    """Numbers at a result as what it is: complex ones of pairs."""
    return torch.view_as_complex(numbers.contiguous()) if done.result.is_complex() else numbers


def _at_end(group: LayerGroup, delta: Tensor) -> Deltas:
    """A derivative at the last node of a group."""
    return {(group.nodes[-1], 0): delta}


def _multipliers(site: Site, scalars: Tensor) -> Tensor:
    """(J, B, C): of the scalars (J, B, T), the sums that the noise of each sample and token of a site has a part in."""
    if site.layout is None:
        return scalars.sum((1, 2), keepdim=True)
    return scalars.sum(2, keepdim=True) if site.reach is None else scalars @ site.reach.to(scalars).T


def _weighted(site: Site, rows: Tensor, numbers: Tensor) -> Tensor:
    """The sum of tangents (K, *S), each times its multiplier."""
    if site.layout is None:
        return (rows * numbers.reshape(-1, *(1,) * (rows.ndim - 1))).sum(0)
    return Grid(site.layout, site.tokens).weighted(rows, numbers)


@derived
def _rules(func: Any, links: tuple[Link, ...]) -> list[tuple[Link, Adjoint]]:
    """The arguments of a node in its group, each with how to pull back to it."""
    rules = [(link, find(func, link.path)) for link in links]
    return [(link, found) for link, found in rules if found.known]


def _read_later(group: LayerGroup, number: int, done: Done) -> list[Tensor]:
    """The tensors that a product or a pull-back will read."""
    reads, called, linked = lookup(done.func).reads, number in group.calls, number in group.links
    inputs = (*done.args, *done.kwargs.values()) if called or (linked and INPUTS in reads) else ()
    result = (done.result,) if RESULT in reads and (called or linked) else ()
    return [tensor for tensor in (*inputs, *result) if isinstance(tensor, Tensor)]
