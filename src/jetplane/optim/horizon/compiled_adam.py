"""Steps of HorizonAdam as compiled graphs: one that looks back along the path, and one that estimates and moves.

What a look back has seen waits on the device for the step after it, so that all steps are the same graph. The first
step, which finds a rate and is like no other, runs uncompiled over the captured program.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ad import _torch
from ...ad.run.casting import Casts
from ...compiler.capture import Compiled, Graph, Run, compiled
from ...compiler.programs import Programs
from ...compiler.replayed import Many, Pool, many_times
from ...compiler.several import Several
from ...gradients import ForwardGradient
from ...gradients.compiled_estimate import refuse_asking
from ...gradients.traced_estimate import TracedEstimate
from .adam_step import Course, LookBack, MovingLeaf, Rules, clipped, look_back, take
from .path import Along, Path

__all__ = ["CompiledAdam", "Steps"]

_SEEN = 5  # numbers of a look back, and whether it is new


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


class CompiledAdam:
    """The steps of one optimizer as graphs, for each program and signature."""

    def __init__(self, estimate: ForwardGradient, rules: Rules, clip: float | None) -> None:
        self._estimate, self._rules, self._clip = estimate, rules, clip
        self._programs = Programs(self._build)
        self._form: _Form | None = None
        self._written: tuple[tuple[float, ...], ...] = ()  # the groups' numbers that the device has
        self._table: Tensor
        self._seen: Tensor
        self._under_way: tuple[Steps, Several, list[Tensor]]

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
        several, found = Several.of(steps.batches, steps.count), list[Tensor]()
        self._under_way = steps, several, found
        try:
            returned = self._programs.call(func, casts.around, casts, several.first, has_aux)
        finally:
            del self._under_way
        if returned is None:
            return None
        return found, _torch.pytree.tree_map(several.every, returned[1]) if has_aux else None

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
            steps, several, found = self._under_way
            if made.traced.is_stale(inputs, steps.count):
                made = self._made(graph, inputs)
            outputs = made.run(inputs, several.fed(inputs), steps)
            found.extend(outputs[-4:])
            return several.keep(outputs[:-4])

        return call

    def _made(self, graph: Graph, inputs: Sequence[Tensor]) -> _Program:
        assert self._form is not None
        traced = self._estimate.traced(graph, inputs)
        frame = _Body(traced, self._form, self._rules, self._clip, len(inputs), self._under_way[0].held)
        return _Program(frame, self._ours)

    def _ours(self, held: Course) -> list[Tensor]:
        assert self._form is not None
        numbers = held.numbers, held.forgetting.slopes, self._table, self._seen
        return [*self._form.flat(held), *numbers, *self._estimate.words]


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
        every = [*inputs, *frame.traced.tensors, *frame.unread(held), *self._ours(held)]
        done, parts = 0, list[list[Tensor]]()
        while done < steps.count:
            calls = steps.calls + done
            ahead = 1 if not calls else min(frame.rules.every - calls % frame.rules.every, steps.count - done)
            some = {place: batch[done : done + ahead] for place, batch in fed.items()}
            if not calls:
                now = [some[place][0] if place in some else tensor for place, tensor in enumerate(every)]
                parts.append([one.unsqueeze(0) for one in frame.first([tensor.detach() for tensor in now])])
            else:
                if calls % frame.rules.every == 0:
                    steps.refresh(calls)
                    self._find(True, every)(every, {place: batch[:1] for place, batch in some.items()}, 1)
                parts.append(self._find(False, every)(every, some, ahead))
            done += ahead
        return [torch.cat(each) if len(parts) > 1 else each[0] for each in zip(*parts, strict=True)]

    def _find(self, back: bool, every: Sequence[Tensor]) -> Many:
        if back not in self._many:
            body = self._frame.back if back else self._frame.step
            reference = None if self._frame.traced.random else body
            made: Compiled = compiled(body, every, reference, writes=True)
            self._many[back] = many_times(made, every, self._pool)
        return self._many[back]


class _Body:
    """What of a step is known before it is traced, and baked in; and the step."""

    def __init__(
        self, traced: TracedEstimate, form: _Form, rules: Rules, clip: float | None, places: int, held: Course
    ) -> None:
        self.traced, self.rules = traced, rules
        self._form, self._clip = form, clip
        self._places = places, places + len(traced.tensors)
        self._unread = [number for number, place in enumerate(traced.places) if place is None]
        self._forgetting = copy.copy(held.forgetting)

    def unread(self, held: Course) -> list[Tensor]:
        """The parameters that the program does not read."""
        return [held.leaves[number].tensor for number in self._unread]

    def back(self, tensors: list[Tensor]) -> list[Tensor]:
        """Look back along the path, and leave what was seen for the step."""
        given, _, held, seen, *_ = self._split(tensors)
        along = look_back(held, partial(self.traced.losses, given), self.traced.replay(given))
        seen.copy_(torch.stack([*along, torch.ones_like(along.slope)]))
        return [seen.clone()]

    def step(self, tensors: list[Tensor]) -> list[Tensor]:
        """A step, which follows what was seen."""
        *_, seen, _, _ = self._split(tensors)
        *numbers, new = seen.unbind()
        outputs = self._step(tensors, LookBack(Along(*numbers), new > 0), None)
        seen.zero_()
        return outputs

    def first(self, tensors: list[Tensor]) -> list[Tensor]:
        """The first step."""
        given, _, held, *_ = self._split(tensors)

        def along(directions: Sequence[Tensor]) -> Along:
            return held.path.along(partial(self.traced.losses, given), directions, self.traced.replay(given))

        return self._step(tensors, None, along)

    def _step(
        self, tensors: list[Tensor], seen: LookBack | None, first: Callable[[Sequence[Tensor]], Along] | None
    ) -> list[Tensor]:
        given, learned, held, _, seed, count = self._split(tensors)
        found = self.traced(given, learned, seed, count, self.traced.replay(given))
        grads = [
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(held.tensors, found.grads, strict=True)
        ]
        taken = take(self.rules, held, found.loss, clipped(grads, self._clip), seen, first)
        count.add_(1)
        return [*found.outputs, found.loss, *taken]

    def _split(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor], Course, Tensor, Tensor, Tensor]:
        """The program's tensors, the estimate's, what a step holds, what was seen, and seed and number of the step."""
        start, end = self._places
        given, learned, rest = tensors[:start], tensors[start:end], tensors[end:]
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
        held = Course(leaves, numbers, forgetting, Path([leaf.tensor for leaf in leaves]))
        return given, learned, held, seen, seed, count
