"""A pass: the program, run once more, watched by a phase."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ad.algebra.jet import PairSet
from ...ad.run.replay import Replay
from ...ad.run.replay_traced import ReplayTraced
from ...errors import UnsupportedProgram
from ..noise.prediction import NOTHING, NoPrediction, Prediction
from ..noise.readout import Readout
from ..noise.signs import Noise
from ..noise.statistics import Statistics
from ..plan.noise_plan import Changed, NoisePlan, Site, Tokens
from ..plan.record import Recorder
from ..program.loss_program import LossProgram
from ..program.parameters import Gradients, Parameters
from ..program.watch import Phase, WatchMode
from .phases import Collector, Injector, Quiet, Rows

__all__ = ["Passes", "capturing"]


def capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, eq=False)
class Passes:
    """The passes of one call: all see the same random numbers and buffers, which are then as after a single run."""

    parameters: Parameters
    program: LossProgram
    replay: Replay | ReplayTraced
    first: list[Tensor] = field(default_factory=list)  # the losses of the run that was recorded, if one was
    weights: Tensor | None = None  # (B,), of the samples' losses in the mean; None: all 1

    def record(self, together: Collection[int] = ()) -> NoisePlan:
        """The plan of what the program does, with layouts still to be found.

        ``together`` are nodes at whose results samples are known not to be apart.
        """
        recorder = Recorder(self.parameters)
        losses, mode, _ = self._run(recorder, 1)
        self.first[:] = [losses.detach().clone()]
        if recorder.is_parameter(losses):
            raise UnsupportedProgram(
                "the losses are a function of parameters alone; expected losses of data, or jetplane.gradient."
            )
        plan = recorder.plan(mode, losses, together)
        plan.writes = self.replay.wrote
        return plan

    def carry(
        self,
        plan: NoisePlan,
        rows: Rows,
        k: int,
        masked: bool = True,
        readout: Readout | None = None,
        prediction: Prediction | NoPrediction = NOTHING,
        statistics: Statistics | None = None,
        shapes: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """The losses' tangents (K, B, T) for tangents (K, *S) at the sites, less what was predicted of them.

        T parts of a sample's loss where the tokens of its input are told apart, and else 1.
        """
        if statistics is None and plan.norms:
            statistics = Statistics(plan)
        given = readout, prediction, statistics, shapes, self.replay
        injector = Injector(plan, rows, self._quiet, masked, *given)
        losses, mode, _ = self._run(injector, k, watched=plan.writes or not capturing())
        self._check(plan, mode, losses)
        with torch.no_grad():
            tangents, predicted = injector.finish(losses, k, self.weights)
            paired = readout is not None and readout.paired
            scalars = _by_token(tangents, readout) if paired else self._loss_tangents(mode, losses, k)
            expected = None if predicted is None else _by_token(predicted, readout).to(scalars)
            if statistics is not None:
                statistics.leave(scalars, expected)
                if not masked:  # a probe
                    scalars = scalars + statistics.marks().unsqueeze(2).to(scalars)
            scalars = scalars if expected is None else scalars - expected
            self.replay.then(scalars)
            return scalars

    def look_at_losses(self, plan: NoisePlan, readout: Readout) -> tuple[Tensor, Any]:
        """The losses, and what came with them; of their input, the derivative."""
        injector = Injector(plan, _no_rows, self.replay.unwatched, False, readout)
        losses, mode, aux = self._run(injector, 1)
        self._check(plan, mode, losses)
        with torch.no_grad():
            injector.finish(losses, 1)
        return losses, aux

    def look(self, plan: NoisePlan, tokens: Tokens, rows: Rows, k: int) -> Tensor:
        """The tangents of the loss's input by sample and token (K, B, T, V), everywhere behind the sites."""
        readout = Readout(replace(plan, tokens=tokens))
        statistics = Statistics(plan) if plan.norms else None
        injector = Injector(plan, rows, self._quiet, False, readout, statistics=statistics)
        losses, mode, _ = self._run(injector, k, probing=True)
        self._check(plan, mode, losses)
        with torch.no_grad():
            return injector.finish(losses, k)[0]

    def collect(
        self,
        plan: NoisePlan,
        noise: Noise,
        scalars: Tensor | None,
        chunk: int,
        approve: Callable[[], None] | None = None,
        prediction: Prediction | NoPrediction = NOTHING,
        statistics: Statistics | None = None,
        shapes: dict[int, Tensor] | None = None,
    ) -> tuple[Tensor, Any]:
        """The last pass: gradients are added to ``.grad``. The losses, and what came with them.

        ``approve`` is called before any gradient, once the program has done what is planned: where there are no sites,
        and so was no pass before this one.
        """
        given = prediction, statistics, shapes, self.replay
        collector = Collector(plan, Gradients(self.parameters), noise, scalars, chunk, *given)
        # where nothing can run after it, nothing has to be put back
        losses, mode, aux = self._run(collector, 1, watched=approve is not None and not capturing())
        self._check(plan, mode, losses)
        if approve:
            approve()
        with torch.no_grad():
            collector.finish(losses, self.weights)
        return losses, aux

    @property
    def _quiet(self) -> Quiet:
        """Around what is no part of the program, where every run is told of all that is done."""
        return self.replay.unwatched if self.replay.watches else contextlib.nullcontext

    def _loss_tangents(self, mode: WatchMode, losses: Tensor, k: int) -> Tensor:
        """Those of each sample's loss, (K, B, 1)."""
        tangent = mode.jet(losses).tangent
        tangent = losses.new_zeros((k, *losses.shape)) if tangent is None else tangent
        found = tangent.reshape(k, losses.shape[0], -1).sum(2, keepdim=True)
        return found if self.weights is None else found * self.weights.to(found).unsqueeze(1)

    def _check(self, plan: NoisePlan, mode: WatchMode, losses: Tensor) -> None:
        """Raise where a run did not do what was planned, or not with the numbers of the run that was recorded."""
        if (mode.nodes, losses.shape[0], mode.origin(losses)) != (len(plan.keys), plan.samples, plan.result):
            raise Changed
        if self.first and not _alike(losses.detach(), self.first[0]):
            raise UnsupportedProgram(
                f"loss_fn returned other losses when it was called again with the same random numbers, by up to "
                f"{float((losses.detach() - self.first[0]).abs().nan_to_num().amax()):.3g}; expected one that keeps "
                "nothing from call to call but memory that it writes in place, buffers of modules, and the random "
                "states of torch, Python and numpy."
            )

    def _run(self, phase: Phase, k: int, watched: bool = True, probing: bool = False) -> tuple[Tensor, WatchMode, Any]:
        mode = WatchMode(PairSet.none(k), self.parameters, phase, probing)
        if watched or self.replay.watches:
            losses, aux = self.replay.run(partial(self.program.under, mode), mode)
        else:  # faster: every operation would be looked at
            self.replay.rewind()
            losses, aux = self.program.under(mode)
        if mode.is_stopped(losses):
            raise UnsupportedProgram(
                "loss_fn detaches its losses, by .detach() or .data, where derivatives stop as backprop's do; expected "
                "losses that depend on the parameters."
            )
        return losses, mode, aux


def _no_rows(site: Site, like: Tensor) -> None:
    """No noise."""


def _by_token(tangents: Tensor, readout: Readout | None) -> Tensor:
    """(K, B, T): what tangents (K, B, T, V) of the loss's input do to the losses."""
    assert readout is not None
    return (tangents * readout.slopes).sum(3)


def _alike(losses: Tensor, first: Tensor) -> bool:
    """Whether they are the same but for rounding, which tangents beside them may change."""
    close = torch.finfo(first.dtype).eps ** 0.5
    size = float(first.abs().nan_to_num(0.0, 0.0, 0.0).amax())
    return torch.allclose(losses, first, rtol=close, atol=close * size, equal_nan=True)
