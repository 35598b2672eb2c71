"""A pass: the program, run once more, watched by a phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ad.jet import PairSet
from ..ad.replay import Replay
from ..errors import UnsupportedProgram
from .control import Prediction
from .noise import Noise
from .parameters import Gradients, Parameters
from .phases import Collector, Injector, Rows
from .plan import Changed, Plan, Recorder
from .program import Program
from .watch import Phase, WatchMode

__all__ = ["Passes", "capturing"]


def capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, eq=False)
class Passes:
    """The passes of one call: all see the same random numbers and buffers, which are then as after a single run."""

    parameters: Parameters
    program: Program
    replay: Replay

    def record(self) -> Plan:
        """The plan of what the program does, with layouts still to be found."""
        recorder = Recorder(self.parameters)
        losses, mode, _ = self._run(recorder, 1)
        if recorder.is_parameter(losses):
            raise UnsupportedProgram(
                "the losses are a function of parameters alone; expected losses of data, or jetplane.gradient."
            )
        plan = recorder.plan(mode, losses)
        plan.writes = self.replay.wrote
        return plan

    def carry(
        self, plan: Plan, rows: Rows, k: int, masked: bool = True, prediction: Prediction | None = None
    ) -> Tensor:
        """The losses' tangents (K, B) for tangents (K, *S) at the sites; less what was predicted of them."""
        injector = Injector(plan, rows, self.replay.unwatched, masked, prediction)
        losses, mode, _ = self._run(injector, k, watched=plan.writes or not capturing())
        _check(plan, mode, losses)
        tangent = mode.jet(losses).tangent
        with torch.no_grad():
            if tangent is None:
                scalars = losses.new_zeros((k, plan.samples))
            else:
                scalars = tangent.reshape(k, plan.samples, -1).sum(2)
            predicted = injector.predicted(losses, k)
            return scalars if predicted is None else scalars - predicted.to(scalars)

    def collect(
        self,
        plan: Plan,
        noise: Noise,
        scalars: Tensor | None,
        chunk: int,
        approve: Callable[[], None] | None = None,
        prediction: Prediction | None = None,
    ) -> tuple[Tensor, Any]:
        """The last pass: gradients are added to ``.grad``. The losses, and what came with them.

        ``approve`` is called before any gradient, once the program has done what is planned: where there are no sites,
        and so was no pass before this one.
        """
        collector = Collector(plan, Gradients(self.parameters), noise, scalars, chunk, prediction)
        # where nothing can run after it, nothing has to be put back
        losses, mode, aux = self._run(collector, 1, watched=approve is not None and not capturing())
        _check(plan, mode, losses)
        if approve:
            approve()
        with torch.no_grad():
            collector.finish(losses)
        return losses, aux

    def _run(self, phase: Phase, k: int, watched: bool = True) -> tuple[Tensor, WatchMode, Any]:
        mode = WatchMode(PairSet.none(k), self.parameters, phase)
        if watched:
            losses, aux = self.replay.run(partial(self.program.under, mode))
        else:  # faster: every operation would be looked at
            self.replay.rewind()
            losses, aux = self.program.under(mode)
        return losses, mode, aux


def _check(plan: Plan, mode: WatchMode, losses: Tensor) -> None:
    if (mode.nodes, losses.shape[0], mode.origin(losses)) != (len(plan.keys), plan.samples, plan.result):
        raise Changed
