"""Forward gradients: two forward passes, and what they say about every weight, in ``.grad``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.run.auxiliary import split_aux
from ..ad.run.budget import parse_bytes
from ..ad.run.parts import Wholes, shared_facts
from ..ad.run.replay import Replay
from ..compiler.capture import Graph
from ..compiler.several import Several, alone, entries, stacked
from ..directions.counter import signed
from ..errors import UnsupportedProgram
from ..parallel.crew import Crew
from ..parallel.digests import tag_of
from ..parallel.shards import Meeting
from .by_parts import ByParts, division_of
from .compiled_estimate import CompiledEstimate
from .kept_by_parameters import KeptByParameters, Known
from .noise.control_variate import ControlVariate
from .noise.lessons import Lessons
from .noise.prediction import Prediction
from .noise.sharded import Sharded
from .noise.signs import Noise, Signs
from .passes.divisions import Divisions
from .passes.kept_plans import KeptPlans, Width
from .passes.program_passes import Passes, capturing
from .passes.resampling import places_of
from .passes.sample_parts import Division, Inseparable, ShardOf
from .passes.two_passes import Estimate, looked_at, two_passes
from .plan.noise_plan import Changed, NoisePlan, Site
from .plan_checks import PlanChecks, warn_of_noise
from .program.loss_program import LossProgram
from .program.parameters import Parameters
from .traced_estimate import Settings, TracedEstimate
from .weight import weight_gradient

__all__ = ["Aux", "ForwardGradient", "Losses", "Paired", "Params", "Plain", "WithAux"]

log = logging.getLogger("jetplane")
_FILLS = 160 << 20  # bytes of a compiled part that keep a GPU busy: docs/compiled.md
_SHARDS = 64  # programs, or forms of a batch, whose plans are kept for compiled calls in a group

Params = Iterable[Any] | Mapping[str, Tensor]
T = TypeVar("T")
Aux = TypeVar("Aux")
Losses = Callable[..., Tensor]
WithAux = Callable[..., tuple[Tensor, Aux]]
Plain = Literal[False]  # has_aux
Paired = Literal[True]


class ForwardGradient:
    """Estimates the gradient of a mean of per-sample losses by forward passes alone, and adds it to ``.grad``.

    Each layer's output gets J = ``samples`` random tangents ``u`` for every sample. A first forward pass carries them
    to the losses, s_jb = sum over layers of u_jb . d loss_b; a second one draws the same numbers again and multiplies
    each layer's own input with mean_j s_jb u_jb, which is d loss_b at its output in the mean over the draws. The layers
    behind which is only the loss get their exact derivative. With ``control``, what the tangents do to the loss's input
    is learned and predicted, and only the rest of it is noise: exactly as unbiased, and less noisy by the call.

    Through more than two batch norms in training, what their statistics add is bounded beside the rest, so that noise
    does not grow with depth; what is beyond the bound is left out. ``batch_norm="exact"`` leaves nothing out.

    With ``resample`` the samples of each batch are drawn again by the size of their losses' slopes, with weights that
    leave the mean as it is: as unbiased, and less noisy once most of a batch is learned, for one more pass of values.

    By default J is found for each program, from 8 to 32, the more the smaller the batch is beside the numbers of a
    sample that get noise (8 where the weights themselves are perturbed, with ``estimator="weight"``).

    What was found out about a program is kept for its next call. ``step`` is the number of the next call, and the noise
    a function of (seed, step). With ``capturable`` it is counted on the device, so that a CUDA graph of a call, which
    can be captured after a first call as it is, draws new numbers at each replay.

    With ``compile`` both passes are one compiled graph for each program and form of the batch, on CUDA replayed:
    docs/compiled.md. A program that cannot be captured is run as it is, with one warning.

    With a ``process_group`` all its processes call it together, each with its own samples of one batch: noise, gradient
    and what is learned are those of the whole batch in one process. Their parameters are compared before every
    ``check_every``-th call. In a ``DeviceMesh`` ("data", "directions") processes with the same samples carry some of
    the tangents each.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> x, y = torch.randn(16, 4), torch.arange(16) % 3
        >>> estimate = ForwardGradient(model.parameters(), samples=2)
        >>> loss = estimate(lambda x, y: torch.nn.functional.cross_entropy(model(x), y, reduction="none"), x, y)
        >>> assert all(p.grad is not None for p in model.parameters()) and estimate.step == 1
    """

    def __init__(
        self,
        params: Params,
        samples: int | None = None,
        *,
        estimator: str = "activation",
        seed: int = 0,
        step: int = 0,
        chunk_size: int | None = None,
        memory: str | int | None = None,
        coupled: str = "sum",
        allow_unused: bool = False,
        control: bool = True,
        batch_norm: str = "bounded",
        resample: bool = False,
        probe_every: int = 50,
        capturable: bool = False,
        compile: bool = False,
        noise: Callable[[Any, Any], Noise] = Signs,
        process_group: Any = None,
        check_every: int | None = 100,
    ) -> None:
        _check_count("samples", samples, optional=True)
        _check_count("chunk_size", chunk_size, optional=True)
        _check_count("probe_every", probe_every)
        _check_word("seed", seed, 64)
        _check_word("step", step, 32)
        _check_choice("estimator", estimator, "activation", "weight")
        _check_choice("coupled", coupled, "sum", "raise")
        _check_choice("batch_norm", batch_norm, "bounded", "exact")
        if chunk_size is not None and memory is not None:
            raise ValueError(f"chunk_size is {chunk_size} and memory {memory!r}; expected one of them.")
        self.samples, self.estimator, self.seed = samples, estimator, seed
        self.coupled, self.allow_unused, self.batch_norm = coupled, allow_unused, batch_norm
        self.resample = resample
        self.crew = Crew(process_group, check_every, type(self).__name__)
        if capturable and not compile and self.crew.processes is not None:
            raise ValueError(
                "capturable is True and there is a process_group; the exchange between processes cannot be captured, "
                "expected capturable=False."
            )
        if compile and self.crew.shares_directions:
            raise ValueError(
                "compile is True and process_group is a DeviceMesh whose processes share tangents; expected "
                "compile=False, or a ProcessGroup."
            )
        self._parameters = Parameters(params)
        if compile and self._parameters.wholes.any:
            raise ValueError(
                f"compile is True and {self._parameters.names[0]} is a sharded parameter, as FSDP's fully_shard makes "
                "them, which is gathered outside of a graph; expected compile=False."
            )
        self.crew.check_shared_out(self._parameters.given, self._parameters.names, type(self).__name__)
        least = _worth_no_part(self._parameters.tensors[0].device, compile)
        self._width = Width(samples, chunk_size, None if memory is None else parse_bytes(memory), least=least)
        self._probe_every = probe_every
        self._noise = noise
        if compile and estimator == "weight":
            raise ValueError("estimator is 'weight' and compile True; expected 'activation' with compile=True.")
        self.compile = compile
        self._compiled: CompiledEstimate | None = None
        self._seed_word: tuple[int, Tensor] | None = None  # the seed, and what a graph reads for it
        self._shards: dict[Any, NoisePlan] = {}  # in a group, by program and form of the batch
        self._plan_checks = PlanChecks(self._parameters)
        tensors, learns = self._parameters.tensors, control and estimator == "activation"
        self._known = Known(KeptPlans(), ControlVariate(tensors) if learns else None, step)
        if capturable or compile:
            self.count_on_device()

    @property
    def step(self) -> int:
        """The number of the next call."""
        return int(self._known.step)

    @step.setter
    def step(self, value: int) -> None:
        _check_word("step", value, 32)
        if isinstance(self._known.step, Tensor):
            self._known.step.fill_(value)
        else:
            self._known.step = value

    def count_on_device(self) -> None:
        """From now on the step is a tensor, which graphs read and count on."""
        step, device = int(self._known.step), self._parameters.tensors[0].device
        self._known.step = torch.full((), step, dtype=torch.int64, device=device)

    def for_graphs(self) -> None:
        """From now on its calls are made by the compiled graphs of somebody else."""
        self.count_on_device()
        self._width = replace(self._width, least=_worth_no_part(self._parameters.tensors[0].device, compiled=True))

    @property
    def wholes(self) -> Wholes:
        """The parameters, where FSDP shares some out: whole for as long as a step needs them."""
        return self._parameters.wholes

    # -- use --------------------------------------------------------------------------------------------------------

    @overload
    def __call__(
        self, loss_fn: Losses, *batch: Any, has_aux: Plain = False, offset: int | None = None, total: int | None = None
    ) -> Tensor: ...
    @overload
    def __call__(
        self, loss_fn: WithAux[Aux], *batch: Any, has_aux: Paired, offset: int | None = None, total: int | None = None
    ) -> tuple[Tensor, Aux]: ...
    @overload
    def __call__(
        self,
        loss_fn: Callable[..., Any],
        *batch: Any,
        has_aux: bool = False,
        offset: int | None = None,
        total: int | None = None,
    ) -> Any: ...
    def __call__(
        self,
        loss_fn: Callable[..., Any],
        *batch: Any,
        has_aux: bool = False,
        offset: int | None = None,
        total: int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """Add the estimate of d mean(loss_fn(*batch)) to ``.grad``; the mean loss, with aux if there is one.

        Where the batch is a part of a larger one, its samples are those from ``offset`` on, of ``total``, and what is
        added is their part of the estimate for all. In a process group the ``total`` is counted, and the samples of a
        process follow those of the processes before it unless there is an ``offset``.
        """
        if not self.compile:
            return self._estimate(self._known, loss_fn, batch, has_aux, offset, total)
        if offset is not None or total is not None:
            raise ValueError(
                f"offset is {offset}, total {total} and compile True; expected compile=False for a part of a batch."
            )
        if self.crew.processes is not None:
            return self._in_group(loss_fn, batch, has_aux)
        found = self._several(loss_fn, alone(batch), 1, has_aux)
        if found is None:
            return self._estimate(self._known, loss_fn, batch, has_aux)
        return _only(found, has_aux)

    @overload
    def steps(self, loss_fn: Losses, *batches: Any, has_aux: Plain = False) -> Tensor: ...
    @overload
    def steps(self, loss_fn: WithAux[Aux], *batches: Any, has_aux: Paired) -> tuple[Tensor, Aux]: ...
    def steps(self, loss_fn: Callable[..., Any], *batches: Any, has_aux: bool = False) -> Tensor | tuple[Tensor, Any]:
        """Add an estimate for each entry of the first axis of the batches; the mean losses (n,), with aux.

        With ``compile`` on CUDA they are replayed as one graph, without a word to the host between them.
        """
        count = entries(loss_fn, batches)
        found = None
        if self.compile and self.crew.processes is None:
            found = self._several(loss_fn, batches, count, has_aux)
        if found is None:
            found = self._one_by_one(loss_fn, batches, count, has_aux)
        return found if has_aux else found[0]

    def _one_by_one(
        self, loss_fn: Callable[..., Any], batches: tuple[Any, ...], count: int, has_aux: bool
    ) -> tuple[Tensor, Any]:
        parts = []
        for number in range(count):
            batch = [one[number] if isinstance(one, Tensor) else one for one in batches]
            if self.compile and self.crew.processes is not None:
                parts.append(split_aux(self._in_group(loss_fn, batch, has_aux), has_aux))
            else:
                parts.append(split_aux(self._estimate(self._known, loss_fn, batch, has_aux), has_aux))
        losses, aux = zip(*parts, strict=True)
        return torch.stack(losses), _torch.pytree.tree_map(stacked, *aux) if has_aux else None

    def _several(
        self, loss_fn: Callable[..., Any], batches: tuple[Any, ...], count: int, has_aux: bool
    ) -> tuple[Tensor, Any] | None:
        """The same as compiled graphs; None where the program cannot be one."""
        self._begin(0)
        compiled = self._graphs()

        def call(division: Division | None) -> tuple[Tensor, Any] | None:
            return compiled(loss_fn, batches, count, self.words, has_aux, division)

        return self.divided(call, loss_fn, batches, has_aux)

    def _in_group(self, loss_fn: Callable[..., Any], batch: Any, has_aux: bool) -> Any:
        """A call as graphs, between which processes exchange what they have found."""
        meeting = self._meeting(self._known, None, None)
        with meeting.around():
            division = self.shard(meeting, loss_fn, batch, has_aux)
            found = self._graphs()(loss_fn, alone(batch), 1, self.words, has_aux, division, meeting)
        if found is None:
            return self._estimate(self._known, loss_fn, batch, has_aux, meeting=meeting)
        return _only(found, has_aux)

    def _graphs(self) -> CompiledEstimate:
        """The calls as compiled graphs, as far as there are any yet."""
        if self._compiled is None:
            self._compiled = CompiledEstimate(self.traced, self._parameters.tensors)
        return self._compiled

    def shard(self, meeting: Meeting, loss_fn: Callable[..., Any], batch: Any, has_aux: bool) -> ShardOf:
        """The samples of this process, among those of all that meet. Of a program that is new it makes a plan."""
        program = self._program(loss_fn, batch, has_aux)
        if program.identity not in self._shards:
            passes = self._passes(program)
            try:
                self._shards[program.identity] = KeptPlans().measured(passes, self._width)
            finally:
                passes.replay.rewind()
            if len(self._shards) > _SHARDS:
                self._shards.pop(next(iter(self._shards)))
        plan = self._shards[program.identity]
        place = meeting.shard(plan.samples, plan.numbers)
        assert place is not None
        count = self._width.samples or plan.tangents_for(place.numbers, place.total)
        return ShardOf(place.total, plan.samples, count)

    def divided(
        self,
        call: Callable[[Division | None], T],
        loss_fn: Callable[..., Any],
        batches: tuple[Any, ...],
        has_aux: bool,
    ) -> T:
        """A compiled ``call``, with how the first of its batches is taken in parts."""
        program = self._program(loss_fn, Several.of(batches, 1).first, has_aux)
        with contextlib.suppress(Inseparable):
            return call(self._division(program))
        self._known.divisions.decide(program, None)
        return call(None)

    def _division(self, program: LossProgram) -> Division | None:
        """How a compiled call takes a batch in parts; None if it does not."""
        known = self._known.divisions
        if program in known or self._width.chunk_size is not None:
            found = known.called(program, self._devices)
            return found if found is None or found.even else None  # an uncompiled call may have found one that is not
        passes = self._passes(program)
        try:
            plan = KeptPlans().measured(passes, self._width)
        finally:
            passes.replay.rewind()
        division = division_of(plan, self._width, program, self._devices, 0, even=True)
        known.decide(program, division)
        return division

    def parts(self, loss_fn: Callable[..., Any], *batch: Any) -> list[tuple[Any, ...]]:
        """The parts that the last call has taken this batch of ``loss_fn`` in: one, if it took it as a whole."""
        division = self._known.divisions.of(LossProgram(loss_fn, batch, False))
        return [batch] if division is None else division.parts(batch)

    def traced(self, graph: Graph, inputs: Sequence[Tensor], division: Division | None) -> TracedEstimate:
        """The estimate over a captured program, or a part of it, as a function of tensors, to be compiled."""
        control, width = self._known.control, self._width
        if division is not None:
            width = width.of_part(division.tangents)
        settings = Settings(
            partial(self._plan, width),
            None if control is None else control.learned,
            lambda plan, held: (width.tangents(plan), width.of(plan, held)),
            self.batch_norm == "exact",
            self._probe_every,
        )
        return TracedEstimate(graph, inputs, self._parameters, settings, self._noise, division)

    def _plan(self, width: Width, passes: Passes) -> NoisePlan:
        """That of a program, made anew, and checked."""
        with _steady():
            plan = KeptPlans().find(passes, width)
        self._see_whether_drawn_again(plan, passes)
        self._checks(plan)
        return plan

    @property
    def words(self) -> list[Tensor]:
        """Seed and step on the device, where a graph reads them: at one address, or it would be captured anew."""
        step = self._known.step
        assert isinstance(step, Tensor)
        if self._seed_word is None or self._seed_word[0] != self.seed:
            self._seed_word = self.seed, torch.full((), signed(self.seed), dtype=torch.int64, device=step.device)
        return [self._seed_word[1], step]

    def _estimate(
        self,
        known: Known,
        loss_fn: Callable[..., Any],
        batch: Any,
        has_aux: bool,
        offset: int | None = None,
        total: int | None = None,
        meeting: Meeting | None = None,
    ) -> Any:
        """The same with what is ``known`` from calls before, which learns from this one."""
        meeting = self._meeting(known, offset, total) if meeting is None else meeting
        with self._parameters.wholes.gathered(), meeting.around():
            program = self._program(loss_fn, batch, has_aux)
            if self.estimator == "weight":
                losses, aux = weight_gradient(
                    self._parameters, program, self._width, self.seed, known.step, self.allow_unused, meeting
                )
            else:
                losses, aux = self._by_activations(program, known, meeting)
        known.step += 1  # in place where it is a tensor
        loss = meeting.mean(losses)
        return (loss, aux) if has_aux else loss

    def remembering(
        self, kept: KeptByParameters, step: int | None, loss_fn: Callable[..., Any], batch: Any, has_aux: bool
    ) -> Any:
        """A call that goes on from what others with the same parameters have left; without a ``step`` it counts on."""
        known = kept.of(self._parameters.tensors)
        mine = replace(known, control=None if self._known.control is None else known.control)
        if step is not None:
            mine.step = step
        result = self._estimate(mine, loss_fn, batch, has_aux)
        known.step = mine.step
        return result

    def _meeting(self, known: Known, offset: int | None, total: int | None) -> Meeting:
        """This call, among those of the other processes."""
        if self.crew.quiet:
            return Meeting(offset, total)
        # alone the step may be a tensor, which nobody asks while a graph is captured
        step = 0 if self.crew.processes is None else int(known.step)
        self._begin(step)
        self.crew.check(step, self._parameters.everywhere[0])
        return self.crew.meeting(f"call {step}", offset, total)

    def _begin(self, step: int) -> None:
        """Before the first call: compare the processes, or say that there are several."""
        self.crew.begin(self.facts, step, *self._parameters.everywhere)

    def facts(self) -> dict[str, Any]:
        """What processes that call it together must have in common."""
        options: dict[str, Any] = {
            "estimator": self.estimator,
            "coupled": self.coupled,
            "batch_norm": self.batch_norm,
            "samples": self.samples,
            "resample": self.resample,
            "control": self._known.control is not None,
        }
        options |= shared_facts(self._parameters.given, self._parameters.names)
        return {"the seed": self.seed, **options}

    def sites(self, loss_fn: Callable[..., Any], *batch: Any, has_aux: bool = False) -> list[Site]:
        """Where noise enters, and how the samples lie there. Touches no gradient, buffer or random state."""
        passes = self._passes(self._program(loss_fn, batch, has_aux))
        with self._parameters.wholes.gathered():
            try:
                with _steady():
                    return self._known.plans.find(passes, self._width).sites
            finally:
                passes.replay.rewind()

    def reset(self) -> None:
        """Forget what the control variate has learned, as for other values of the parameters."""
        if self._known.control is not None:
            self._known.control.reset()

    def state_dict(self) -> dict[str, Any]:
        """What has to be kept to go on as if nothing had happened: numbers, and under "control" tensors by name."""
        learned = {} if self._known.control is None else self._known.control.state_dict()
        return {"seed": self.seed, "step": self.step, "control": learned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was."""
        _check_word("seed", state["seed"], 64)
        self.step = state["step"]
        self.seed = state["seed"]
        if self._known.control is not None:
            self._known.control.load_state_dict(state.get("control", {}))

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle: all but the plans, which are made anew."""
        known = replace(self._known, plans=KeptPlans(), divisions=Divisions())
        return self.__dict__ | {"_known": known, "_compiled": None, "_shards": {}}

    # -- passes -----------------------------------------------------------------------------------------------------

    def _program(self, loss_fn: Callable[..., Any], batch: Any, has_aux: bool) -> LossProgram:
        if torch.is_inference_mode_enabled():
            raise UnsupportedProgram("forward_gradient runs in torch.inference_mode(); expected torch.no_grad().")
        self._parameters.refresh()
        return LossProgram(loss_fn, batch, has_aux)

    def _passes(self, program: LossProgram) -> Passes:
        devices = [] if capturing() else self._devices
        return Passes(self._parameters, program, Replay(devices))

    def _by_activations(self, program: LossProgram, known: Known, meeting: Meeting) -> tuple[Tensor, Any]:
        devices = None if capturing() else self._devices
        if meeting.whole and (division := known.divisions.called(program, devices)) is not None:
            with contextlib.suppress(Changed, Inseparable):
                return self._by_parts(division, program, known)
            known.divisions.decide(program, None)
        plan = self._known_plan(known, self._width, program)
        passes = self._passes(program)
        if plan is not None:
            with contextlib.suppress(Changed):
                return self._follow(plan, passes, known, meeting)
        with _steady():
            return self._anew(passes, known, meeting)

    def _known_plan(self, known: Known, width: Width, program: LossProgram) -> NoisePlan | None:
        """The plan that a call will probably follow; None if it is to be made, or looked at."""
        plan = known.plans.known(program, width, self._probe_every)
        if capturing() and (plan is None or plan.random):
            what = "is new" if plan is None else "draws random numbers"
            raise UnsupportedProgram(
                f"a CUDA graph is captured of a program that {what}; expected a call as it is before it, and no "
                "dropout."
            )
        return plan

    def _anew(self, passes: Passes, known: Known, meeting: Meeting) -> tuple[Tensor, Any]:
        """The passes of a program that is planned now."""
        plan, program = known.plans.measured(passes, self._width), passes.program
        if meeting.whole and not capturing() and program not in known.divisions:
            passes.replay.rewind()
            held = self._parameters.kept_apart
            division = division_of(plan, self._width, program, self._devices, held)
            known.divisions.decide(program, division)
            if division is not None:
                with contextlib.suppress(Changed, Inseparable):
                    return self._by_parts(division, program, known)
                known.divisions.decide(program, None)
        plan = known.plans.find(passes, self._width, plan)
        self._see_whether_drawn_again(plan, passes)
        return self._follow(plan, passes, known, meeting)

    def _see_whether_drawn_again(self, plan: NoisePlan, passes: Passes) -> None:
        plan.resampled = places_of(plan, passes) if self.resample else ()

    def _by_parts(self, division: Division, program: LossProgram, known: Known) -> tuple[Tensor, Any]:
        """The losses (B,) of a batch in parts, and aux; gradients are added. Adds none where it raises Changed or
        Inseparable."""
        width, exact = self._width.of_part(division.tangents), self.batch_norm == "exact"
        noise, held = self._noise(self.seed, known.step), self._parameters.kept_apart
        ways = self._checks, self._passes, partial(self._known_plan, known, width), self._see_whether_drawn_again
        parts = ByParts(division, known, width, noise, exact, *ways, held)
        with self._parameters.apart():
            losses, aux = parts.run(program)
            gradients = [tensor.grad for tensor in self._parameters.tensors]
        self._parameters.hand_over(gradients)
        parts.settle()
        return losses, aux

    def _checks(self, plan: NoisePlan) -> None:
        """Raise what can be told only of a plan that the program has followed."""
        self._plan_checks(plan, self.allow_unused, self.coupled)

    @property
    def _devices(self) -> list[torch.device]:
        return [tensor.device for tensor in self._parameters.tensors]

    def _follow(self, plan: NoisePlan, passes: Passes, known: Known, meeting: Meeting) -> tuple[Tensor, Any]:
        """Both passes. Raises Changed where the program is another one, before a gradient is touched."""
        if plan.resampled:
            with contextlib.suppress(Changed):
                return self._follow_as(plan, plan.resampled, passes, known, meeting)
            plan.resampled = ()  # what it does depends on the samples that it is given
        return self._follow_as(plan, (), passes, known, meeting)

    def _follow_as(
        self, plan: NoisePlan, places: tuple[int, ...], passes: Passes, known: Known, meeting: Meeting
    ) -> tuple[Tensor, Any]:
        """The same, of the batch as it is or, where places in it are given, drawn again."""
        one = self._estimate_by(plan, self._noise(self.seed, known.step), known.control, meeting)
        due = not (capturing() or plan.noisy) and plan.age % self._probe_every == 0
        look = partial(warn_of_noise, plan) if due else None
        one = replace(one, resampled=places if one.sharing is None else ())
        run = partial(two_passes, passes, one, partial(self._checks, plan), look)
        return run() if plan.whole is None else self._together(meeting, one, run)

    def _estimate_by(self, plan: NoisePlan, noise: Noise, control: ControlVariate | None, meeting: Meeting) -> Estimate:
        noise, width = self._placed(plan, noise, meeting)
        count = width.tangents(plan)
        readout, prediction = looked_at(plan, None if control is None else control.learned, count)
        if isinstance(prediction, Prediction):
            prediction.lessons = Lessons() if meeting.together else None
        chunk = width.of(plan, prediction.held) if plan.sites else 1
        exact = self.batch_norm == "exact"
        return Estimate(plan, noise, noise, count, chunk, readout, prediction, exact, meeting.tangents)

    def _placed(self, plan: NoisePlan, noise: Noise, meeting: Meeting) -> tuple[Noise, Width]:
        """The noise of these samples, and how many tangents, where they are a part of a batch."""
        shard = meeting.shard(plan.samples, plan.numbers)
        plan.whole = None if shard is None else shard.total
        if shard is None:
            return noise, self._width
        width = self._width
        if width.samples is None:
            width = replace(width, samples=plan.tangents_for(shard.numbers, shard.total))
        return Sharded(noise, plan, shard.offset, shard.total), width

    def _together(self, meeting: Meeting, one: Estimate, run: Callable[[], tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
        """The passes of a part of a batch: to ``.grad`` all is added at once, what other processes found as well."""
        lessons = one.prediction.lessons if isinstance(one.prediction, Prediction) else None
        with self._parameters.apart() as found:
            losses, aux = run()
            gradients, tag = found(), tag_of([one.plan.name, [*one.prediction.sites]])
        learned = [] if lessons is None else lessons.parts()
        sums = meeting.sums(tag, losses, lambda: [*gradients, *learned])
        if sums is None:
            one.plan.due = True  # what the samples are was looked for in vain, where they were not finite
            if isinstance(one.prediction, Prediction):
                one.prediction.count()
            self._parameters.accumulate([torch.full_like(gradient, torch.nan) for gradient in gradients])
            return losses, aux
        self._parameters.accumulate(sums[: len(gradients)])
        if lessons is not None and isinstance(one.prediction, Prediction):
            one.prediction.settle(sums[len(gradients) :])
        return losses, aux


def _worth_no_part(device: torch.device, compiled: bool) -> int:
    """Bytes that a pass may hold whatever the program is: to save more, by more parts, is not worth their time.

    On a GPU one more part is one more pass of Python, or, compiled, as many launches again of kernels that are so small
    that a launch takes as long: docs/compiled.md.
    """
    if device.type != "cuda":
        return 0
    return _FILLS if compiled else torch.cuda.get_device_properties(device).total_memory // 64


def _only(found: tuple[Tensor, Any], has_aux: bool) -> Any:
    """What a call returns, from the losses (1,) and the aux of one entry."""
    losses, aux = found
    return (losses[0], _torch.pytree.tree_map_only(Tensor, lambda one: one[0], aux)) if has_aux else losses[0]


@contextlib.contextmanager
def _steady() -> Iterator[None]:
    """Refuse a program that differs from the plan that was made of it a moment ago."""
    try:
        yield
    except Changed:
        raise UnsupportedProgram(
            "loss_fn did other operations when it was called again with the same random numbers; expected one that "
            "depends on nothing but its arguments, its parameters and torch's random state."
        ) from None


def _check_count(name: str, value: object, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected a positive whole number.")


def _check_choice(name: str, text: object, *known: str) -> None:
    if text not in known:
        raise ValueError(f"{name} is {text!r}; expected one of {', '.join(map(repr, known))}.")


def _check_word(name: str, value: object, bits: int) -> None:
    if not isinstance(value, int) or not 0 <= value < 1 << bits:
        raise ValueError(f"{name} is {value!r}; expected a whole number from 0 to 2**{bits} - 1.")
