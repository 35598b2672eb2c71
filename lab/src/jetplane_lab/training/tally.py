"""What the steps of an epoch found, kept on the device and fetched once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetplane.solvers import Status

from ..methods.forward import ForwardReport

__all__ = ["Running", "Tally"]


@dataclass(frozen=True)
class Running:
    """Averages over an epoch, while the parameters move."""

    first_loss: float  # of the epoch's first batch
    nll: float  # over samples
    accuracy: float
    slope: float | None  # over steps and directions
    curvature: float | None
    negative_curvature: float | None
    step_length: float | None
    not_taken: dict[str, int]


class Tally:
    """Collects the reports of an epoch."""

    def __init__(self, lr: float, curved: bool) -> None:
        self._lr, self._curved = lr, curved  # curved: the curvature was measured, and is not just zero
        self._rows: list[Tensor] = []  # each (steps, 3 + 3 K): loss, hits, status, slopes, curvatures, coefficients
        self._sizes: list[int] = []
        self._statuses: Counter[str] = Counter()
        self._coded = False

    def accumulate(self, report: Any, size: int) -> None:
        """Take in a step on a batch of ``size`` samples, by the report that its optimizer gives.

        This and `accumulate_steps` are the only places that look at reports. Nothing is fetched from the device, and
        the row is new memory, for an optimizer may reuse that of its report.
        """
        parts = [report.loss, report.aux.sum(), report.loss]  # a status that the host knows leaves its place unused
        if isinstance(report, ForwardReport):
            self._coded, parts[2] = True, report.code
        elif report.status is not Status.OK:
            self._statuses[report.status.name] += 1
        if hasattr(report, "slope"):
            parts += [report.slope, report.curvature.diagonal(), report.coefficients]
        self._enter([part.reshape(1, -1) for part in parts], [size])

    def accumulate_steps(self, reports: Any, sizes: list[int]) -> None:
        """Take in several steps on batches of these sizes, whose statuses are still numbers on the device."""
        steps = len(sizes)
        numbers = [reports.loss, reports.aux.flatten(1).sum(1) if reports.aux.ndim > 1 else reports.aux, reports.loss]
        if hasattr(reports, "code"):
            self._coded, numbers[2] = True, reports.code
        if hasattr(reports, "slope"):
            numbers += [reports.slope, reports.curvature.diagonal(dim1=1, dim2=2), reports.coefficients]
        self._enter([part.reshape(steps, -1) for part in numbers], sizes)

    def _enter(self, columns: list[Tensor], sizes: list[int]) -> None:
        self._rows.append(torch.cat([column.detach() for column in columns], dim=1))
        self._sizes += sizes

    def last(self) -> float:
        """The loss of the last step, NaN before there is one. Waits for the device."""
        return float(self._rows[-1][-1, 0]) if self._rows else math.nan

    def fetch(self, total: Callable[[int], int] = int) -> Running:
        """Wait for the device, and average in float64. ``total`` adds up the hits of all processes."""
        table = torch.cat(self._rows).to("cpu", torch.float64)
        sizes = torch.tensor(self._sizes, dtype=torch.float64)
        samples = float(sizes.sum())
        if self._coded:
            codes, counts = table[:, 2].long().unique(return_counts=True)
            found = {tuple(Status)[code]: count for code, count in zip(codes.tolist(), counts.tolist(), strict=True)}
            self._statuses.update({status.name: n for status, n in found.items() if status is not Status.OK})
        slopes, curvatures, coefficients = table[:, 3:].chunk(3, dim=1) if table.shape[1] > 3 else (None, None, None)
        if not self._curved:
            curvatures = None
        return Running(
            first_loss=float(table[0, 0]),
            nll=float((table[:, 0] * sizes).sum()) / samples,
            accuracy=total(int(table[:, 1].sum())) / samples,
            slope=None if slopes is None else float(slopes.abs().mean()),
            curvature=None if curvatures is None else float(curvatures.mean()),
            negative_curvature=None if curvatures is None else float((curvatures < 0).double().mean()),
            step_length=None if coefficients is None else self._lr * float(coefficients.norm(dim=1).mean()),
            not_taken=dict(self._statuses),
        )
