"""Which programs have their batches taken in parts of the samples, as far as it was found out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..program.loss_program import LossProgram
from .sample_parts import Division, agree

__all__ = ["Divisions"]

_KEPT = 64
_LOOKED = 50  # calls after which parts are compared with the whole again; then after ever more, for it takes two passes


@dataclass(eq=False)
class _Decided:
    division: Division | None  # None: a batch is taken as a whole
    calls: int = 0
    due: int = field(default_factory=lambda: _LOOKED)


class Divisions:
    """By program and form of the batch."""

    def __init__(self) -> None:
        self._decided: OrderedDict[Any, _Decided] = OrderedDict()

    def __contains__(self, program: LossProgram) -> bool:
        return program.identity in self._decided

    def of(self, program: LossProgram) -> Division | None:
        """How its batch is taken in parts; None if it is not, or nothing is known of it."""
        found = self._decided.get(program.identity)
        return None if found is None else found.division

    def decide(self, program: LossProgram, division: Division | None) -> None:
        """From now on, its batches of this form are taken so."""
        self._decided[program.identity] = _Decided(division)
        if len(self._decided) > _KEPT:
            self._decided.popitem(last=False)

    def called(self, program: LossProgram, devices: Sequence[torch.device] | None) -> Division | None:
        """The same as :meth:`of`, for one more call; now and then it is looked whether parts are still those of it.

        Without ``devices`` nothing is looked at, as where a CUDA graph is captured.
        """
        found = self._decided.get(program.identity)
        if found is None or found.division is None:
            return None
        self._decided.move_to_end(program.identity)
        found.calls += 1
        if devices is not None and found.calls >= found.due:
            found.due = 2 * found.calls
            if not agree(program, found.division, devices):
                found.division = None
        return found.division
