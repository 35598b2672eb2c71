r"""Noise in each sample's own copy of a convolution's weight, where that has far fewer numbers than the output.

A tangent v of the weight (out, in), drawn for each sample by itself, makes the tangent v x_p of the output at every
place p, with the window x_p of the input (and a 1 for the bias). s_b v_b is then the sample's gradient in the mean, as
noisy as there are weights, not outputs.

The windows' entries are much alike, so white v would go mostly into a few of their directions. The gradient's variance
with noise v = z K^T is out tr(K^-1 K^-T) tr(K^T S K) for the second moment S of the samples' gradients, which is about
that of the windows, E[x x^T] = M: least for K K^T ~ M^(-1/2). Any K that does not depend on z gives the same mean. K is
scaled so that the tangents of an output have a variance of about 1, as other noise has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..program.done import Done
from ..program.watch import Path

__all__ = ["OwnWeights"]

aten = torch.ops.aten

_FEWER = 8  # numbers of the output for each one of the weight, at least
_RIDGE = 0.1  # of the mean second moment: what is added to all of them, more than the rounding of TF32
_TURNS = 16  # of Newton and Schulz: enough for a ratio of 1e-5
_WEIGHT, _BIAS = (1,), (2,)


@dataclass(frozen=True)
class OwnWeights:
    """Of one call of a convolution."""

    weight: torch.Size  # (out, in, ...)
    bias: bool  # whether it has one that is a parameter

    @staticmethod
    def of(key: tuple[Any, ...], shape: torch.Size, numbers: float) -> OwnWeights | None:
        """For an operation with this signature and output, and else so many numbers of a sample's noise; or None."""
        func, _, parameters, settings = key[:4]
        shapes: dict[Path, torch.Size] = {path: size for path, size, *_ in parameters}
        if func is not aten.convolution.default or not {_WEIGHT} <= shapes.keys() <= {_WEIGHT, _BIAS}:
            return None
        *_, transposed, _, groups = settings
        found = OwnWeights(shapes[_WEIGHT], _BIAS in shapes)
        plain = not transposed and groups == 1 and len(found.weight) == len(shape)
        return found if plain and _FEWER * found.numbers <= numbers else None

    @property
    def _side(self) -> int:
        return self.weight[1:].numel() + self.bias

    @property
    def numbers(self) -> int:
        """Of a sample's noise."""
        return self.weight[0] * self._side

    def like(self, done: Done) -> Tensor:
        """A tensor in the shape (B, n) of a row of noise."""
        return done.result.new_empty(()).expand(done.result.shape[0], self.numbers)

    def apply(self, done: Done, noise: Tensor, shape: Tensor) -> Tensor:
        """What noise (K, B, n) does to the output (K, *S): v x_p with v = z K^T, where ``shape`` is K."""
        windows = self._windows(done)
        rows, samples = noise.shape[:2]
        weights = noise.reshape(rows, samples, self.weight[0], self._side) @ shape.T.to(noise.dtype)
        # (B, K out, in) with (B, in, places)
        found = weights.transpose(0, 1).flatten(1, 2) @ windows
        return found.unflatten(1, (rows, -1)).transpose(0, 1).reshape(rows, *done.result.shape)

    def undo(self, found: Tensor, shape: Tensor) -> dict[Path, Tensor]:
        """By parameter: its gradient, from the derivative (B, n) by the noise z, which is that by v times K."""
        whole = found.sum(0, dtype=shape.dtype).reshape(self.weight[0], self._side)
        whole = torch.linalg.solve_triangular(shape, whole, upper=False, left=False)  # whole K^-1
        gradients: dict[Path, Tensor] = {_WEIGHT: whole[:, : self.weight[1:].numel()].reshape(self.weight)}
        return gradients | ({_BIAS: whole[:, -1]} if self.bias else {})

    def _windows(self, done: Done) -> Tensor:
        """Those of the input (B, in, places), with a 1 for the bias."""
        x, weight, _, stride, padding, dilation = done.args[:6]
        axes = range(weight.ndim - 2)
        windows = F.pad(x, [padding[axis] for axis in reversed(axes) for _ in range(2)])
        for axis in axes:  # views: torch's own unfold launches a kernel for each sample
            spread = dilation[axis] * (weight.shape[axis + 2] - 1) + 1
            windows = windows.unfold(axis + 2, spread, stride[axis])[..., :: dilation[axis]]
        windows = windows.movedim(tuple(range(2, weight.ndim)), tuple(range(-len(axes), 0)))
        windows = windows.reshape(len(x), weight[0].numel(), -1)
        return F.pad(windows, (0, 0, 0, 1), value=1.0) if self.bias else windows

    def shape(self, done: Done) -> Tensor:
        """K, a lower triangle (side, side): small, and a function of the input alone."""
        windows = self._windows(done)
        samples, side, places = windows.shape
        moment = (windows @ windows.mT).sum(0, dtype=torch.float64) / (samples * places)
        eye = torch.eye(side, dtype=moment.dtype, device=moment.device)
        moment = moment + (_RIDGE * moment.trace() / side + torch.finfo(torch.float32).tiny) * eye
        root, inverse = _roots(moment, eye)
        return torch.linalg.cholesky_ex(inverse / root.trace())[0]


def _roots(matrix: Tensor, eye: Tensor) -> tuple[Tensor, Tensor]:
    """Square root and its inverse of a positive matrix, by Newton and Schulz: products alone, as a graph needs."""
    size = matrix.trace()
    root, inverse = matrix / size, eye
    for _ in range(_TURNS):
        step = 1.5 * eye - 0.5 * (inverse @ root)
        root, inverse = root @ step, step @ inverse
    return root * size.sqrt(), (inverse + inverse.T) / (2 * size.sqrt())
