"""Steps of HorizonAdam as compiled graphs: one that looks back along the path, and one that estimates and moves.

What a look back has seen waits on the device for the step after it, so that all steps are the same graph. The first
step, which finds a rate and is like no other, runs uncompiled over the captured program.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ad import _torch
from ...ad.run.casting import Casts
from ...compiler.capture import Compiled, Graph, Run, compiled
from ...compiler.in_parts import InParts, joined
from ...compiler.programs import Programs
from ...compiler.replayed import Many, Pool, many_times
from ...compiler.several import Several
from ...gradients import ForwardGradient
from ...gradients.compiled_estimate import places_of, refuse_asking
from ...gradients.passes.sample_parts import Division
from ...gradients.traced_estimate import Part, TracedEstimate
from ...parallel.crew import Crew
from ...parallel.shards import Meeting
from .adam_step import Course, LookBack, MovingLeaf, Rules, clipped, look_back, return_, take
from .path import Along, Path

__all__ = ["CompiledAdam", "Steps"]

_Function = Callable[[list[Tensor]], list[Tensor]]
_Exchange = Callable[[Sequence[Tensor], Tensor], Tensor]

_SEEN = 6  # numbers of a look back, and whether it is new


@dataclass(frozen=True, eq=False)
class Steps:
    """Some steps that are to be taken, and what they begin with."""

    batches: tuple[Any, ...]
    count: int
    calls: int  # steps before
    held: Course
    refresh: Callable[[int], None]  # of the axes, before the step after so many


@dataclass(frozen=True, eq=False)
class _Form:
    """What of the parameters a graph has baked in."""

    keys: tuple[tuple[str, ...], ...]  # what is kept for each
    group: tuple[int, ...]  # of each, among the different ones
    found: tuple[bool, ...]  # of each group: whether its rate is

    @staticmethod
    def of(held: Course) -> tuple[_Form, tuple[tuple[float, ...], ...]]:
        """That of some parameters, and the numbers of their groups."""
        numbers = [_numbers(leaf) for leaf in held.leaves]
        different = list(dict.fromkeys(numbers))
        keys = tuple(tuple(sorted(leaf.state)) for leaf in held.leaves)
        group, found = tuple(map(different.index, numbers)), tuple(one[2] is None for one in different)
        return _Form(keys, group, found), tuple(tuple(0.0 if one is None else one for one in row) for row in different)

    def same(self, other: _Form) -> bool:
        return (self.keys, self.group, self.found) == (other.keys, other.group, other.found)

    def flat(self, held: Course) -> list[Tensor]:
        """All that is kept for the parameters."""
        return [leaf.state[key] for leaf, keys in zip(held.leaves, self.keys, strict=True) for key in keys]


def _numbers(leaf: MovingLeaf) -> tuple[Any, ...]:
    rate = None if leaf.rate is None else float(leaf.rate)
    return float(leaf.lr), float(leaf.decay), rate, *map(float, leaf.betas), float(leaf.begun)


class _UnderWay(NamedTuple):
    """Some steps, on both sides of the program between them."""

    steps: Steps
    several: Several
    division: Division | None  # where their batches go in parts
    found: list[Tensor]
    meeting: Meeting | None  # of the processes that take the step together


class CompiledAdam:
    """The steps of one optimizer as graphs, for each program and signature."""

    def __init__(self, estimate: ForwardGradient, rules: Rules, clip: float | None) -> None:
        self._estimate, self._rules, self._clip = estimate, rules, clip
        self._programs = Programs(self._build)
        self._form: _Form | None = None
        self._written: tuple[tuple[float, ...], ...] = ()  # the groups' numbers that the device has
        self._table: Tensor
        self._seen: Tensor
        self._under_way: _UnderWay
        crew = estimate.crew
        self._crew = None if crew.processes is None else crew

    def is_of(self, estimate: ForwardGradient, rules: Rules, clip: float | None) -> bool:
        """Whether the optimizer is still what it was when its steps were compiled."""
        return (self._estimate, self._rules, self._clip) == (estimate, rules, clip)

    def __call__(
        self, func: Callable[..., Any], casts: Casts, steps: Steps, has_aux: bool
    ) -> tuple[list[Tensor], Any] | None:
        """Loss, rate, lead and taken of the steps, stacked, and aux.

        None where the program has to be run as it is, and no step was taken.
        """
        self._set(steps.held)

        def call(division: Division | None, meeting: Meeting | None = None) -> tuple[list[Tensor], Any] | None:
            several, found = (
                Several.of(steps.batches, steps.count, None if division is None else division.part),
                list[Tensor](),
            )
            self._under_way = _UnderWay(steps, several, division, found, meeting)
            try:
                returned = self._programs.call(func, casts.around, (casts, division), several.first, has_aux)
            finally:
                del self._under_way
            if returned is None:
                return None
            return found, _torch.pytree.tree_map(several.every, returned[1]) if has_aux else None

        if self._crew is not None:
            first = Several.of(steps.batches, 1).first
            meeting = self._crew.meeting(f"step {steps.calls}", None, None)
            with meeting.around():
                return call(self._estimate.shard(meeting, func, first, has_aux), meeting)
        return self._estimate.divided(call, func, steps.batches, has_aux)

    def _set(self, held: Course) -> None:
        """Bring the groups' numbers on the device up to date."""
        form, numbers = _Form.of(held)
        device = held.numbers.device
        if self._form is None or not self._form.same(form):
            self._programs.clear()
            self._form, self._written = form, ()
            self._table = torch.zeros((len(numbers), len(numbers[0])), dtype=torch.float64, device=device)
            self._seen = torch.zeros(_SEEN, dtype=torch.float64, device=device)
        if numbers != self._written:
            self._table.copy_(torch.tensor(numbers, dtype=torch.float64, device="cpu"))
            self._written = numbers

    # -- one program ------------------------------------------------------------------------------------------------

    def _build(self, graph: Graph, inputs: Sequence[Tensor]) -> Run:
        refuse_asking(graph)
        made = self._made(graph, inputs)

        def call(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            nonlocal made
            steps, several, _, found, meeting = self._under_way
            if made.traced.is_stale(inputs, steps.count):
                made = self._made(graph, inputs)
            made.traced.stand(meeting)
            outputs = made.run(inputs, several.fed(inputs), steps)
            found.extend(outputs[-4:])
            return several.keep(outputs[:-4])

        return call

    def _made(self, graph: Graph, inputs: Sequence[Tensor]) -> _Program:
        assert self._form is not None
        steps, several, division, *_ = self._under_way
        traced = self._estimate.traced(graph, inputs, division)
        parts = [] if division is None else places_of(inputs, several.fed(inputs))
        group = None if self._crew is None else _Others(self._crew, lambda: self._under_way.meeting)
        frame = _Body(traced, self._form, self._rules, self._clip, len(inputs), steps.held, parts, group)
        return _Program(frame, self._ours)

    def _ours(self, held: Course) -> list[Tensor]:
        assert self._form is not None
        numbers = held.numbers, held.forgetting.slopes, self._table, self._seen
        return [*self._form.flat(held), *numbers, *self._estimate.words]


class _Others(NamedTuple):
    """The processes that take a step together, and their meeting at the one under way."""

    crew: Crew
    meeting: Callable[[], Meeting | None]


class _Program:
    """The steps over one captured program."""

    def __init__(self, frame: _Body, ours: Callable[[Course], list[Tensor]]) -> None:
        self._frame, self._ours = frame, ours
        self._pool = Pool()  # both graphs share it: they take turns
        self._many: dict[bool, Many] = {}  # by whether it is the look back

    @property
    def traced(self) -> TracedEstimate:
        return self._frame.traced

    def run(self, inputs: Sequence[Tensor], fed: dict[int, Tensor], steps: Steps) -> list[Tensor]:
        """The outputs of the program, and of the steps, stacked."""
        frame, held = self._frame, steps.held
        every = [*inputs, *frame.traced.tensors, *frame.sums, *frame.unread(held), *self._ours(held)]
        done, parts = 0, list[list[Tensor]]()
        while done < steps.count:
            calls = steps.calls + done
            ahead = 1 if not calls else min(frame.rules.every - calls % frame.rules.every, steps.count - done)
            some = {place: batch[done : done + ahead] for place, batch in fed.items()}
            if not calls:
                now = [tensor.detach() for tensor in _first_of(every, some)]
                parts.append([one.unsqueeze(0) for one in frame.first(now)])
            else:
                if calls % frame.rules.every == 0:
                    steps.refresh(calls)
                    self._find(True, every)(every, {place: batch[:1] for place, batch in some.items()}, 1)
                parts.append(self._find(False, every)(every, some, ahead))
            done += ahead
        return [torch.cat(each) if len(parts) > 1 else each[0] for each in zip(*parts, strict=True)]

    def _find(self, back: bool, every: Sequence[Tensor]) -> Many:
        if back not in self._many:
            made = self._frame.back(every) if back else self._frame.step(every)
            self._many[back] = many_times(made, every, self._pool, alone=self._frame.group is None)
        return self._many[back]


def _first_of(every: Sequence[Tensor], batches: dict[int, Tensor]) -> list[Tensor]:
    """The tensors of the first of several steps."""
    return [batches[place][0] if place in batches else tensor for place, tensor in enumerate(every)]


class _Body:
    """What of a step is known before it is traced, and baked in; and the step.

    Where the batch goes in parts, ``parts`` are the places of what they divide. Then the gradients are added to sums of
    their own, and a step follows the last part.
    """

    def __init__(
        self,
        traced: TracedEstimate,
        form: _Form,
        rules: Rules,
        clip: float | None,
        places: int,
        held: Course,
        parts: Sequence[int],
        group: _Others | None,
    ) -> None:
        self.traced, self.rules, self.group = traced, rules, group
        self._form, self._clip, self._parts = form, clip, parts
        gradients = [] if traced.division is None else [torch.zeros_like(leaf) for leaf in held.tensors]
        self.sums = [*traced.sums, *gradients]
        self._starts = places, places + len(traced.tensors), places + len(traced.tensors) + len(self.sums)
        self._unread = [number for number, place in enumerate(traced.places) if place is None]
        self._forgetting = copy.copy(held.forgetting)

    def unread(self, held: Course) -> list[Tensor]:
        """The parameters that the program does not read."""
        return [held.leaves[number].tensor for number in self._unread]

    def compiled(self, body: _Function, every: Sequence[Tensor]) -> Compiled:
        return compiled(body, every, None if self.traced.random else body, writes=True)

    def step(self, every: Sequence[Tensor]) -> Compiled:
        """A step, which follows what was seen of the path."""
        if self.traced.division is None:
            return self.compiled(self._whole, every)
        return self._in_parts(every, self._part, self._end, self.traced.loss_like, self._met)

    def back(self, every: Sequence[Tensor]) -> Compiled:
        """A look back along the path, which leaves what was seen for the step."""
        if self.traced.division is None:
            return self.compiled(self._look, every)
        numbers = torch.zeros(_SEEN - 1, dtype=torch.float64, device=every[-1].device)
        return self._in_parts(every, self._look_part, self._look_end, numbers, self._seen_by_all)

    def _in_parts(
        self, every: Sequence[Tensor], part: _Function, end: _Function, share: Tensor, exchange: _Exchange
    ) -> Compiled:
        offsets = self.traced.offsets
        parts, last = self.compiled(part, [*every, offsets[0]]), self.compiled(end, [*every, share])
        if self.group is not None and exchange == self._seen_by_all:
            parts = Compiled(partial(_told, self.group.crew, parts), parts.written)
        aux = self.traced.aux if part == self._part else []
        return InParts(parts, last, self._parts, offsets, aux, None if self.group is None else exchange).compiled

    def _met(self, tensors: Sequence[Tensor], loss: Tensor) -> Tensor:
        """The mean loss of all processes, with lessons and gradients of all in the place of this one's."""
        assert self.group is not None
        meeting = self.group.meeting()
        assert meeting is not None
        return self.traced.met(meeting, *self._sums_of(self._split(list(tensors))), loss)

    def _seen_by_all(self, tensors: Sequence[Tensor], numbers: Tensor) -> Tensor:
        """The numbers of a look back, over the samples of all processes."""
        assert self.group is not None
        return Path([], self.group.crew).averaged(numbers, self.traced.plan.samples)

    def first(self, tensors: list[Tensor]) -> list[Tensor]:
        """The first step."""
        now = self._split(tensors, None if self.group is None else self.group.crew)

        def along(directions: Sequence[Tensor]) -> Along:
            return now.held.path.along(self._losses(now.given), directions, self.traced.replay(now.given))

        if self.traced.division is None:
            outputs, loss, grads = self._estimated(tensors, None)
            return [*outputs, *self._take(now, loss, grads, None, along)]
        found = []
        for number, offset in enumerate(self.traced.offsets):
            found.append(self._part([*self._part_of(tensors, number), offset]))
        loss = torch.stack([outputs[-1] for outputs in found]).sum(0)
        if self.group is not None:
            loss = self._met(tensors, loss)
        return [*joined(found, self.traced.aux)[:-1], *self._ended(tensors, loss, None, along)]

    # -- a step in one ----------------------------------------------------------------------------------------------

    def _look(self, tensors: list[Tensor]) -> list[Tensor]:
        now = self._split(tensors)
        losses = partial(self.traced.losses, now.given)
        return _noted(now, look_back(now.held, [losses], self.traced.replay(now.given)))

    def _whole(self, tensors: list[Tensor]) -> list[Tensor]:
        now = self._split(tensors)
        outputs, loss, grads = self._estimated(tensors, None)
        return [*outputs, *self._take(now, loss, grads, now.look_back, None)]

    def _estimated(self, tensors: list[Tensor], part: Part | None) -> tuple[list[Tensor], Tensor, list[Tensor | None]]:
        now = self._split(tensors)
        found = self.traced(now.given, now.learned, now.seed, now.number, self.traced.replay(now.given), part)
        return found.outputs, found.loss, found.grads

    def _take(
        self,
        now: _Now,
        loss: Tensor,
        grads: Sequence[Tensor | None],
        seen: LookBack | None,
        first: Callable[[Sequence[Tensor]], Along] | None,
    ) -> list[Tensor]:
        leaves = now.held.tensors
        filled = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]
        taken = take(self.rules, now.held, loss, clipped(filled, self._clip), seen, first)
        now.number.add_(1)
        now.seen.zero_()
        return [loss, *taken]

    # -- a step in parts --------------------------------------------------------------------------------------------

    def _look_part(self, tensors: list[Tensor]) -> list[Tensor]:
        now, division = self._split(tensors[:-1]), self.traced.division
        assert division is not None
        losses, replay = partial(self.traced.losses, now.given), self.traced.replay(now.given)
        return [now.held.path.numbers(now.held.trail, [losses], replay) / division.count]

    def _look_end(self, tensors: list[Tensor]) -> list[Tensor]:
        now, seen = self._split(tensors[:-1]), Along.of(tensors[-1])
        return_(now.held, seen)
        return _noted(now, seen)

    def _part(self, tensors: list[Tensor]) -> list[Tensor]:
        *tensors, offset = tensors
        now = self._split(tensors)
        lessons, gradients = self._sums_of(now)
        outputs, loss, grads = self._estimated(tensors, Part(offset, lessons))
        for total, grad in zip(gradients, grads, strict=True):
            if grad is not None:
                total.add_(grad)
        return [*outputs, loss]

    def _end(self, tensors: list[Tensor]) -> list[Tensor]:
        *tensors, loss = tensors
        return self._ended(tensors, loss.clone(), self._split(tensors).look_back, None)

    def _ended(
        self,
        tensors: list[Tensor],
        loss: Tensor,
        seen: LookBack | None,
        first: Callable[[Sequence[Tensor]], Along] | None,
    ) -> list[Tensor]:
        now = self._split(tensors)
        lessons, gradients = self._sums_of(now)
        taken = self._take(now, loss, gradients, seen, first)
        self.traced.settle(now.learned, lessons)
        for total in gradients:
            total.zero_()
        return taken

    def _losses(self, given: list[Tensor]) -> list[Callable[[], Tensor]]:
        """The program's losses, in the parts of the batch."""
        division = self.traced.division
        if division is None:
            return [partial(self.traced.losses, given)]
        return [partial(self.traced.losses, self._part_of(given, number)) for number in range(division.count)]

    def _part_of(self, tensors: list[Tensor], number: int) -> list[Tensor]:
        division = self.traced.division
        assert division is not None
        start = number * division.size
        return [
            tensor.narrow(0, start, division.size) if place in self._parts else tensor
            for place, tensor in enumerate(tensors)
        ]

    def _sums_of(self, now: _Now) -> tuple[list[Tensor], list[Tensor]]:
        """What lessons and gradients are added to."""
        lessons = len(self.traced.sums)
        return now.sums[:lessons], now.sums[lessons:]

    def _split(self, tensors: list[Tensor], crew: Crew | None = None) -> _Now:
        own, sums, start = self._starts
        given, learned, totals, rest = tensors[:own], tensors[own:sums], tensors[sums:start], tensors[start:]
        unread, states = rest[: len(self._unread)], rest[len(self._unread) :]
        *states, numbers, slopes, table, seen, seed, count = states
        left, others = iter(states), iter(unread)
        rows, leaves = [row.unbind() for row in table.unbind()], []
        for place, keys, group in zip(self.traced.places, self._form.keys, self._form.group, strict=True):
            tensor = next(others) if place is None else given[place]
            lr, decay, rate, first, second, begun = rows[group]
            state = {key: next(left) for key in keys}
            leaves.append(
                MovingLeaf(tensor, state, lr, decay, None if self._form.found[group] else rate, (first, second), begun)
            )
        forgetting = copy.copy(self._forgetting)
        forgetting.slopes = slopes
        held = Course(leaves, numbers, forgetting, Path([leaf.tensor for leaf in leaves], crew))
        return _Now(given, learned, totals, held, seen, seed, count)


class _Now(NamedTuple):
    """The tensors of a step."""

    given: list[Tensor]  # the program's
    learned: list[Tensor]  # the estimate's
    sums: list[Tensor]  # of what parts of the batch have found
    held: Course
    seen: Tensor  # of a look back
    seed: Tensor
    number: Tensor  # of the step

    @property
    def look_back(self) -> LookBack:
        """What was seen, for the step after it."""
        *numbers, new = self.seen.unbind()
        return LookBack(Along(*numbers), new > 0)


def _told(crew: Crew, look: Compiled, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """A look back, of which other processes are told where it fails."""
    with Path([], crew).told():
        return look(tensors)


def _noted(now: _Now, along: Along) -> list[Tensor]:
    """Leave for the step what a look back has seen."""
    now.seen.copy_(torch.stack([*along, torch.ones_like(along.slope)]))
    return [now.seen.clone()]
