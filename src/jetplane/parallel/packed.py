"""Quadratic models as the numbers that go over the wire, and their mean by weights.

    [tag, W, W loss, W slope_k, W curvature_kl (k <= l)]                 2 + 1 + K + K(K+1)/2 numbers in float64
    [..., n, sum_b (s_bk - s_k)(s_bl - s_l) (k <= l)]                    where the solver uses the noise of the slope

W is the weight of what the model is the mean of. The numbers of parts add up to those of the whole; the scatter of the
n slopes s_b of single samples is that within the parts and between their means. The tag says whether the parts are of
the same step at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ad.algebra.jet import Quadratic

__all__ = ["Parcel"]

_HEAD = 3  # the tag, the weight, the loss


@dataclass(frozen=True)
class Parcel:
    """Which numbers there are of a model.

    Example:
        >>> form = Parcel(1, curved=True, noise=False)
        >>> few, many = (Quadratic(*map(torch.tensor, (x, [x], [[x]]))) for x in (1.0, 5.0))
        >>> form.model(form.merged([form.packed(few, 3.0), form.packed(many, 1.0)]), few)
        Quadratic(loss=tensor(2.), slope=tensor([2.]), curvature=tensor([[2.]]), noise=None)
    """

    k: int
    curved: bool  # else the curvature is zero, and not sent
    noise: bool

    @property
    def length(self) -> int:
        """How many numbers."""
        pairs = self.k * (self.k + 1) // 2
        return _HEAD + self.k + pairs * self.curved + (1 + pairs) * self.noise

    def packed(self, model: Quadratic, weight: float, count: int = 0, tag: float = 0.0) -> Tensor:
        """The numbers of a model that is the mean of ``count`` losses of single samples; 0: of one number."""
        record = torch.zeros(self.length, dtype=torch.float64, device="cpu")
        record[0], record[1] = tag, weight
        if weight == 0:  # the mean of nothing, which need not be a number
            return record
        parts = [model.loss.reshape(1), model.slope]
        if self.curved:
            parts.append(self._upper(model.curvature))
        numbers = torch.cat([part.detach().to("cpu", torch.float64) for part in parts]) * weight
        record[2 : 2 + len(numbers)] = numbers
        if self.noise and count:
            self._scatter(record)[0] = count
            if model.noise is not None:
                scatter = self._upper(model.noise).to("cpu", torch.float64)
                self._scatter(record)[1:] = scatter * (count * (count - 1))
        return record

    def merged(self, records: Sequence[Tensor]) -> Tensor:
        """The numbers of all parts together, added up in their order. The tag is the first one's."""
        first, *others = records
        total = first.clone()
        for record in others:
            if self.noise:
                self._scatter(total)[1:] += self._between(total, record)
            total[1:] += record[1:]
        return total

    def model(self, record: Tensor, like: Quadratic) -> Quadratic:
        """The mean that the numbers are of, in the dtype and on the device of ``like``."""
        weight = record[1]
        numbers = record[2 : 2 + 1 + self.k + (self.k * (self.k + 1) // 2) * self.curved] / weight
        loss, slope = numbers[0].to(like.loss), numbers[1 : 1 + self.k].to(like.slope)
        curvature = self._matrix(numbers[1 + self.k :]) if self.curved else numbers.new_zeros(self.k, self.k)
        return Quadratic(loss, slope, curvature.to(like.curvature), self._noise(record, like))

    def _noise(self, record: Tensor, like: Quadratic) -> Tensor | None:
        if not self.noise:
            return like.noise
        count, scatter = self._scatter(record)[0], self._scatter(record)[1:]
        return self._matrix(scatter / (count * (count - 1))).to(like.slope) if count > 1 else None

    def _scatter(self, record: Tensor) -> Tensor:
        return record[-1 - self.k * (self.k + 1) // 2 :]

    def _between(self, one: Tensor, other: Tensor) -> Tensor:
        """The scatter that two parts have because their means differ."""
        n, m = self._scatter(one)[0], self._scatter(other)[0]
        if n == 0 or m == 0:
            return torch.zeros_like(self._scatter(one)[1:])
        slopes = slice(_HEAD, _HEAD + self.k)
        gap = one[slopes] / one[1] - other[slopes] / other[1]
        return self._upper(gap.unsqueeze(1) * gap) * (n * m / (n + m))

    def _upper(self, matrix: Tensor) -> Tensor:
        rows, columns = torch.triu_indices(self.k, self.k, device=matrix.device)
        return matrix[rows, columns]

    def _matrix(self, upper: Tensor) -> Tensor:
        rows, columns = torch.triu_indices(self.k, self.k, device=upper.device)
        matrix = upper.new_zeros(self.k, self.k)
        matrix[rows, columns] = upper
        matrix[columns, rows] = upper
        return matrix
