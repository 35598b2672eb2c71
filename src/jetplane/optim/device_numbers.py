"""What a compiled step needs beside the program's tensors, on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..directions.counter import signed
from .moving import Moving
from .step_settings import Numbers

__all__ = ["DeviceNumbers"]


class DeviceNumbers:
    """The numbers of the groups as tensors, written only when the host changes them."""

    def __init__(self, device: torch.device, leaves: int) -> None:
        self.device = device
        with torch.inference_mode(False):  # they are written outside of it, too
            self._whole = torch.zeros(3, dtype=torch.int64, device=device)  # step, seed, bad steps in a row
            self._rates = torch.zeros((2, leaves), dtype=torch.float64, device=device)  # lr and decay of each leaf
            self._state = torch.zeros((), dtype=torch.float64, device=device)  # of a solver
        self._written: tuple[Any, ...] = ()  # rates that the host knows of
        self._known: float | None = None  # the state that the host knows of: the device goes on by itself
        self._steps = (-1, -1, -1)  # those that the host knows of: the device counts on by itself

    @property
    def tensors(self) -> list[Tensor]:
        return [self._whole, self._rates, self._state]

    @property
    def bad(self) -> int:
        """How many steps in a row, up to the last, could not move the parameters. Waits for the device."""
        bad = int(self._whole[2])
        self._steps = *self._steps[:2], bad
        return bad

    @property
    def state(self) -> float | None:
        """The state of the solver, None where it has none."""
        self._known = None if self._known is None else float(self._state)
        return self._known

    def set(self, now: Numbers, moving: Moving) -> None:
        """Bring the device up to date."""
        if now.solver_state is not None and now.solver_state != self._known:
            self._state.fill_(now.solver_state)
            self._known = now.solver_state
        steps = now.step, now.seed, now.bad
        if steps != self._steps:
            self._whole.copy_(torch.tensor([now.step, signed(now.seed), now.bad], device="cpu"))
            self._steps = steps
        rates = moving.lrs, moving.decays
        if rates != self._written:
            self._rates.copy_(torch.tensor(rates, dtype=torch.float64, device="cpu"))
            self._written = rates

    def advance(self, count: int) -> None:
        """The graph has counted these steps."""
        step, seed, bad = self._steps
        self._steps = step + count, seed, bad
