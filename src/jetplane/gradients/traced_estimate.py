"""An estimate over a captured program as a function of tensors, which is traced and compiled.

The plan is made before, of real tensors: probes ask for values, and a trace has none. What the passes read beside the
program's tensors, as learned Jacobians and masks of what is read, are inputs, too: nothing that changes is baked in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ad.run.replay import Replay
from ..ad.run.replay_traced import ReplayTraced
from ..compiler.capture import Graph
from ..errors import CaptureFailed
from ..parallel.digests import tag_of
from ..parallel.shards import Meeting
from .noise.learned import Learned
from .noise.lessons import Lessons, Sums
from .noise.prediction import NoPrediction, Prediction
from .noise.readout import Readout
from .noise.sharded import Sharded
from .noise.signs import Noise
from .noise.traced import again
from .passes.program_passes import Passes
from .passes.sample_parts import Division, Inseparable, ShardOf
from .passes.two_passes import Estimate, looked_at, two_passes
from .plan.noise_plan import Changed, NoisePlan, Site
from .program.loss_program import LossProgram
from .program.parameters import Parameters

__all__ = ["Found", "Part", "Settings", "TracedEstimate"]

Noises = Callable[[Any, Any], Noise]  # of a seed and a step


class Found(NamedTuple):
    """What an estimate gives."""

    outputs: list[Tensor]  # of the program
    loss: Tensor  # (), the mean
    grads: list[Tensor | None]  # by parameter; None where the losses do not depend on it


class Part(NamedTuple):
    """What a call on a part of a batch is given."""

    offset: Tensor  # (), of its first sample
    sums: Sequence[Tensor]  # twins of `TracedEstimate.sums`, to which its lessons are added


class Settings(NamedTuple):
    """What a :class:`jetplane.ForwardGradient` says of its estimates."""

    plan: Callable[[Passes], NoisePlan]
    learned: Callable[[NoisePlan, Readout | None], Learned | None] | None  # None: nothing is
    width: Callable[[NoisePlan, int], tuple[int, int]]  # J, and the tangents at a time beside so many bytes held
    exact_norms: bool
    probe_every: int  # calls after which a plan is looked at again, for the first time


class TracedEstimate:
    """Both passes over one captured program, by a plan.

    ``tensors`` are what they need beside the program's inputs. A call takes twins of both, and writes the learned ones.

    With a ``division`` the program is that of a part of a batch. A call then is one of several, which add what is to be
    learned to ``sums``, and :meth:`settle` comes after the last.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[Tensor],
        parameters: Parameters,
        settings: Settings,
        noise: Noises,
        division: Division | None = None,
    ) -> None:
        self._graph, self._parameters, self._settings, self._noise = graph, parameters, settings, noise
        self.division = division
        places = {tensor: place for place, tensor in enumerate(inputs)}
        self.places = [places.get(tensor) for tensor in parameters.tensors]  # of each parameter; None: it is not read
        self._unread = {n: tensor.detach() for n, tensor in enumerate(parameters.tensors) if tensor not in places}
        self._written: list[int] = []  # places of what the program writes; none is known yet
        self.plan, replay = self._planned(inputs)
        self._written = [place for place, tensor in enumerate(inputs) if replay.wrote_to(tensor)]
        if division is not None:
            if not isinstance(division, ShardOf):
                self._refuse_inseparable(division)
            self.plan.whole = division.samples
        # (), of each part: its first sample's place in the batch
        starts = [] if division is None else range(0, division.count * division.size, division.size)
        self.offsets = [torch.full((), start, dtype=torch.int64, device=self.loss_like.device) for start in starts]
        self._learned, self._width = self._start()
        self._sums = None if division is None or self._learned is None else Sums(self._learned)
        self._calls, self._due = 0, settings.probe_every

    def _refuse_inseparable(self, division: Division) -> None:
        if not self.plan.apart:
            raise Inseparable("the samples of a part are coupled")
        if any(shape[:1] != (division.size,) for shape in self._graph.aux.values()):
            raise Inseparable("aux has not an entry for each sample")

    def _planned(self, inputs: Sequence[Tensor]) -> tuple[NoisePlan, Replay]:
        """The plan of what the program does with these inputs, which are left as they are."""
        passes = self._passes([tensor.detach() for tensor in inputs], Replay({tensor.device for tensor in inputs}))
        assert isinstance(passes.replay, Replay)
        try:
            plan = self._settings.plan(passes)
            self.loss_like = passes.first[0].new_zeros(())  # its dtype, and where it is
            return plan, passes.replay
        finally:
            passes.replay.rewind()

    def _start(self) -> tuple[Learned | None, tuple[int, int]]:
        """The tensors of a control variate, if there is to be one; J, and how many tangents are carried at a time."""
        if not self.plan.sites:
            return None, (1, 1)
        learned, width = self._settings.learned, self._settings.width
        readout, prediction = looked_at(self.plan, learned, width(self.plan, 0)[0])
        if not prediction.sites or learned is None:
            return None, width(self.plan, 0)
        return learned(self.plan, readout), width(self.plan, prediction.held)

    def is_stale(self, inputs: Sequence[Tensor], calls: int) -> bool:
        """Whether a plan of today would be another one: looked at after ever more calls, for it takes some passes."""
        self._calls += calls
        if self._calls < self._due and not self.plan.due:  # due: it was made of losses that are NaN
            return False
        self._due = 2 * self._calls
        return not _alike(self.plan, self._planned(inputs)[0])

    @property
    def aux(self) -> list[int]:
        """The places of the outputs that the program returns beside its losses."""
        return list(self._graph.aux)

    @property
    def random(self) -> bool:
        """Whether the program draws random numbers."""
        return self.plan.random

    @property
    def tensors(self) -> list[Tensor]:
        """What was learned, and what the plan knows of the sites."""
        known = [] if self._learned is None else list(self._learned.tensors().values())
        return [*known, *_masks(self.plan)]

    @property
    def sums(self) -> list[Tensor]:
        """What the parts of a batch add their lessons to: zero, before the first of them."""
        return [] if self._sums is None else self._sums.tensors

    @property
    def _jacobians(self) -> int:
        """How many of them are a control variate's."""
        return 0 if self._learned is None else len(self._learned.tensors())

    def replay(self, given: Sequence[Tensor]) -> ReplayTraced:
        """For the runs of one step, all of which see the same random numbers and buffers."""
        return ReplayTraced([given[place].detach() for place in self._written])

    def __call__(
        self,
        given: Sequence[Tensor],
        own: Sequence[Tensor],
        seed: Tensor,
        step: Tensor,
        replay: ReplayTraced,
        part: Part | None = None,
    ) -> Found:
        """The estimate for the program's inputs ``given`` and twins of :attr:`tensors`."""
        passes = self._passes([tensor.detach() for tensor in given], replay)
        count, chunk = self._width
        with self._predicted(own) as (readout, prediction):
            lessons = None if part is None else Lessons()
            if isinstance(prediction, Prediction):
                prediction.lessons = lessons
            replay.in_turn = self.plan.trace is not None or chunk < count
            noises = self._noise if part is None else self._shifted(part.offset)
            noise = _InTurn(noises, seed, step, replay)
            same = _InTurn(noises, again(seed), again(step), replay)
            exact, places = self._settings.exact_norms, self.plan.resampled
            one = Estimate(self.plan, noise, same, count, chunk, readout, prediction, exact, resampled=places)
            try:
                losses, outputs = two_passes(passes, one, _nothing)
            except Changed:
                raise CaptureFailed("its operations are others where it is traced") from None
            if part is not None and lessons is not None and self._sums is not None:
                self._sums.add(part.sums, lessons)
        leaves = passes.parameters.tensors
        grads = [leaf.grad if place is not None else None for leaf, place in zip(leaves, self.places, strict=True)]
        outputs[self._graph.loss] = losses.clone()  # as made, they may be a view of what the step will write
        return Found(outputs, losses.sum() / self.plan.total, grads)

    def stand(self, meeting: Meeting | None) -> None:
        """The samples of the next call are those that this process has at a meeting."""
        if meeting is not None:
            for tensor in self.offsets:
                tensor.fill_(meeting.offset)

    def met(self, meeting: Meeting, sums: Sequence[Tensor], gradients: Sequence[Tensor], loss: Tensor) -> Tensor:
        """Let ``sums`` and ``gradients`` be those of all processes; their mean loss, of this one's share of it."""
        plan = self.plan
        meeting.shard(plan.samples, plan.numbers)  # as many as were counted
        lessons = [] if self._sums is None else self._sums.lessons(sums).parts()
        tag = tag_of([plan.name, [] if self._learned is None else list(self._learned.jacobians)])
        found = meeting.sums(tag, (loss * plan.total).reshape(1), lambda: [*gradients, *lessons])
        if found is None:
            for gradient in gradients:
                gradient.fill_(torch.nan)
            if self._sums is not None:
                sums[0].fill_(1.0)  # from what is not finite nobody learns
            return meeting.mean(loss.reshape(1))
        for tensor, total in zip(gradients, found, strict=False):
            tensor.copy_(total)
        if self._sums is not None:
            self._sums.put(sums, found[len(gradients) :])
        return meeting.mean(loss.reshape(1))

    def settle(self, own: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """Learn from what all parts of a batch have added to ``sums``, which are zero again."""
        if self._sums is None:
            return
        with self._predicted(own) as (_, prediction):
            assert isinstance(prediction, Prediction)
            prediction.lessons = self._sums.lessons(sums)
            prediction.settle(prediction.lessons.parts())
        for tensor in sums:
            tensor.zero_()

    @contextlib.contextmanager
    def _predicted(self, own: Sequence[Tensor]) -> Iterator[tuple[Readout | None, Prediction | NoPrediction]]:
        """What is seen and predicted with twins of :attr:`tensors`, inside."""
        jacobians, masks = own[: self._jacobians], own[self._jacobians :]
        learned = None if self._learned is None else self._learned.twin(jacobians)
        with _held(self.plan, masks):
            yield looked_at(self.plan, None if learned is None else lambda *_: learned, self._width[0])

    def _shifted(self, offset: Tensor) -> Noises:
        """The noise of the samples from ``offset`` on."""
        return lambda seed, step: Sharded(self._noise(seed, step), self.plan, offset, self.plan.total)

    def losses(self, given: Sequence[Tensor]) -> Tensor:
        """The program's losses (B,), with the tangents that a pass around it carries."""
        found = self._graph(given)[self._graph.loss]
        return found if found.ndim == 1 else found.flatten(1).sum(1)

    def _passes(self, plain: Sequence[Tensor], replay: Replay | ReplayTraced) -> Passes:
        tensors = [self._unread[number] if place is None else plain[place] for number, place in enumerate(self.places)]
        return Passes(self._parameters.at(tensors), LossProgram(_Runs(self, replay), (plain,), True), replay)


class _Runs:
    """The runs of a captured program. In a trace, each has inputs of its own, or a compiler would keep what it did."""

    def __init__(self, traced: TracedEstimate, replay: Replay | ReplayTraced) -> None:
        fixed = {*traced.places, *traced._written}
        self._graph, self._replay = traced._graph, replay
        self._copied = lambda place: isinstance(replay, ReplayTraced) and place not in fixed
        self._count = 0

    def __call__(self, plain: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        if self._count:
            after = self._replay.after if isinstance(self._replay, ReplayTraced) else None
            plain = [again(tensor, after) if self._copied(place) else tensor for place, tensor in enumerate(plain)]
        self._count += 1
        outputs = self._graph.bare(plain)
        return outputs[self._graph.loss], outputs


class _InTurn:
    """Noise that is drawn once what comes before it was made, where a compiler is to keep that order."""

    def __init__(self, noise: Noises, seed: Tensor, step: Tensor, replay: ReplayTraced) -> None:
        self._noise, self._seed, self._step, self._replay = noise, seed, step, replay

    def rows(self, site: int, start: int, stop: int, like: Tensor) -> Tensor:
        after = self._replay.after
        seed = self._seed if after is None else again(self._seed, after)
        return self._noise(seed, self._step).rows(site, start, stop, like)


def _nothing() -> None:
    pass


_MASKS = ("live", "reach")


def _masks(plan: NoisePlan) -> list[Tensor]:
    """What is known of the sites' entries, as far as there is something."""
    found = (getattr(site, name) for site in plan.sites for name in _MASKS)
    return [mask for mask in found if mask is not None]


def _alike(one: NoisePlan, other: NoisePlan) -> bool:
    """Whether two plans of a program agree about which entries belong to which samples and tokens."""
    if one.resampled != other.resampled or list(map(_facts, one.sites)) != list(map(_facts, other.sites)):
        return False
    pairs = zip(_masks(one), _masks(other), strict=True)
    return all(torch.equal(mask, another) for mask, another in pairs)


def _facts(site: Site) -> Any:
    return site.layout, site.coupled, site.tokens, *(getattr(site, name) is None for name in _MASKS)


@contextlib.contextmanager
def _held(plan: NoisePlan, masks: Sequence[Tensor]) -> Iterator[None]:
    """The plan with other tensors for its masks, inside: a trace must not bake them in."""
    left = iter(masks)
    before = [(site, name, getattr(site, name)) for site in plan.sites for name in _MASKS]
    try:
        for site, name, mask in before:
            if mask is not None:
                setattr(site, name, next(left))
        yield
    finally:
        for site, name, mask in before:
            setattr(site, name, mask)
