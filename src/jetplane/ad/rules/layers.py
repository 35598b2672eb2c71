"""Rules of layers: pooling, resizing, sampling on a grid, dropout, bags of embeddings, recurrent cells, distances."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedProgram
from .. import _torch
from ..algebra.families import composite, jet_rule, primal_of
from ..algebra.jet import Operand, PairSet

aten = torch.ops.aten

# -- linear layers with a batch axis: the row axis is folded into it ----------------------------------------------


def folded(op: Any, space: int, sizes_at: int | None = None) -> None:
    """An operation linear in its first argument, (C, *space) or (N, C, *space), that treats all examples alike.

    ``sizes_at`` is the position of an argument that repeats the shape of the result, where there is one.
    """

    @jet_rule(op, "linear")
    def rule(pairs: PairSet, op: Any, x: Operand, *args: Any, **kwargs: Any) -> Operand:
        def lift(rows: Tensor | None) -> Tensor | None:
            if rows is None:
                return None
            if rows.ndim == space + 2:  # no batch axis: the rows are one
                return op(rows, *args, **kwargs)
            y = op(rows.flatten(0, 1), *_with_batch(args, sizes_at, rows.shape[0]), **kwargs)
            return y.unflatten(0, rows.shape[:2])

        return Operand(op(x.primal, *args, **kwargs), lift(x.tangent), lift(x.second))


def _with_batch(args: tuple[Any, ...], sizes_at: int | None, rows: int) -> tuple[Any, ...]:
    """``args`` with the batch size in the list at ``sizes_at`` multiplied by the number of rows."""
    if sizes_at is None:
        return args
    batch, *rest = args[sizes_at - 1]
    return (*args[: sizes_at - 1], [rows * batch, *rest], *args[sizes_at:])


folded(aten.avg_pool2d.default, 2)
folded(aten.avg_pool3d.default, 3)
folded(aten._adaptive_avg_pool2d.default, 2)
folded(aten._adaptive_avg_pool3d.default, 3)

# names of operations by the number of their axes; each has its backward
RESIZES = {
    1: ("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d"),
    2: (
        *("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d"),
        *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    ),
    3: ("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d"),
}
for _space, _names in RESIZES.items():
    for _name in _names:
        folded(getattr(aten, _name).default, _space)

# -- maxima: the values are gathered from the plane of each channel -----------------------------------------------


def _tiles(
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> bool:
    """Whether the windows of a pool are small and lie side by side."""
    plain = not any(padding) and all(n == 1 for n in dilation) and not ceil_mode
    return plain and len(kernel) == 2 and math.prod(kernel) <= 9 and list(stride) in ([], list(kernel))


class _Windows:
    """The rows at the maxima of windows side by side: reads all of each window, in order.

    A compiler makes one pass of it with what stands before; the memory of a gather is read in no order.
    """

    def __init__(self, indices: Tensor, x: Tensor, kernel: Sequence[int]) -> None:
        (self._height, self._width), (self._down, self._across) = indices.shape[-2:], kernel
        row = torch.arange(self._height, device=x.device).unsqueeze(1) * self._down
        column = torch.arange(self._width, device=x.device) * self._across
        self._place = indices - (row * x.shape[-1] + column)  # of the maximum, from the window's corner
        self._line = x.shape[-1]

    def __call__(self, rows: Tensor | None) -> Tensor | None:
        if rows is None:
            return None
        out = torch.zeros((), dtype=rows.dtype, device=rows.device)
        for down in range(self._down):
            for across in range(self._across):
                one = rows[..., down :: self._down, across :: self._across][..., : self._height, : self._width]
                out = torch.where(self._place == down * self._line + across, one, out)
        return out


def gathered(op: Any, space: int) -> None:
    """An operation (values, indices) whose values are x at flat indices into its last ``space`` axes."""

    @jet_rule(op, "gather")
    def rule(pairs: PairSet, op: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Operand):  # fractional pooling: perturbed random samples
            return op(x, *map(primal_of, args), **kwargs)
        values, indices = op(x.primal, *map(primal_of, args), **kwargs)
        if op is aten.max_pool2d_with_indices.default and _torch.is_fake(type(indices)) and _tiles(*args, **kwargs):
            windows = _Windows(indices, x.primal, args[0])
            return Operand(values, windows(x.tangent), windows(x.second)), indices
        size = math.prod(x.primal.shape[-space:])
        planes = torch.arange(0, x.primal.numel(), max(size, 1), device=indices.device)
        # one long gather is faster than one per plane
        at = (indices.flatten(-space).flatten(0, -2) + planes.unsqueeze(1)).flatten()

        def lift(rows: Tensor | None) -> Tensor | None:
            if rows is None:
                return None
            if rows.is_contiguous():
                return rows.flatten(1).gather(1, at.expand(rows.shape[0], -1)).unflatten(1, indices.shape)
            # row by row: flat they have to be copied, and the rows of a layer's output are the peak of memory
            return torch.stack([row.flatten().gather(0, at) for row in rows]).unflatten(1, indices.shape)

        return Operand(values, lift(x.tangent), lift(x.second)), indices


for _op, _space in (
    (aten.max_pool2d_with_indices, 2), (aten.max_pool3d_with_indices, 3),
    (aten.adaptive_max_pool2d, 2), (aten.adaptive_max_pool3d, 3),
    (aten.fractional_max_pool2d, 2), (aten.fractional_max_pool3d, 3),
):  # fmt: skip
    gathered(_op.default, _space)


@jet_rule(aten.max_unpool2d.default, "linear")
@jet_rule(aten.max_unpool3d.default, "linear")
def _max_unpool(pairs: PairSet, op: Any, x: Operand, indices: Tensor, size: list[int], *rest: Any) -> Operand:
    y = op(x.primal, indices, size, *rest)
    space = len(size)
    at = indices.flatten(-space)

    def lift(rows: Tensor | None) -> Tensor | None:
        if rows is None:
            return None
        plane = rows.new_zeros((*rows.shape[:-space], math.prod(y.shape[-space:])))
        # added, not written: torch's derivative keeps every source of an index that occurs twice
        plane = plane.scatter_add(-1, at.expand(rows.shape[0], *at.shape), rows.flatten(-space))
        return plane.unflatten(-1, y.shape[-space:])

    return Operand(y, lift(x.tangent), lift(x.second))


# -- sampling on a grid -------------------------------------------------------------------------------------------

_LINEAR, _NEAREST, _CUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)


def sample(x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Tensor:
    """x (N, C, *space) at the points of grid (N, *out, axes of space, the last one first)."""
    sizes = x.shape[2:]
    points = [_pixels(grid[..., -1 - axis], size, align_corners) for axis, size in enumerate(sizes)]
    if mode == _CUBIC:
        taps = [_cubic_taps(point) for point in points]
        taps = [
            [(_inside(place, size, padding, align_corners), weight) for place, weight in axis]
            for axis, size in zip(taps, sizes, strict=True)
        ]
    else:
        points = [_inside(p, size, padding, align_corners) for p, size in zip(points, sizes, strict=True)]
        taps = [_nearest_tap(p) if mode == _NEAREST else _linear_taps(p) for p in points]
    terms = [_tap(x, corner) for corner in itertools.product(*taps)]
    return sum(terms[1:], terms[0])


def _pixels(coordinate: Tensor, size: int, align_corners: bool) -> Tensor:
    """From [-1, 1] to positions of pixels."""
    return coordinate * ((size - 1) / 2 if align_corners else size / 2) + (size - 1) / 2


def _inside(place: Tensor, size: int, padding: int, align_corners: bool) -> Tensor:
    if padding == _ZEROS:
        return place
    if padding == _REFLECTION:
        low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
        place = _reflect(place, low, high)
    # on the border itself torch takes the derivative zero, unlike clamp
    free = (place > 0) & (place < size - 1)
    return torch.where(free, place, place.detach().clamp(0, size - 1))


def _reflect(place: Tensor, low: float, high: float) -> Tensor:
    if low == high:
        return torch.zeros_like(place)
    offset = (place - low).abs()
    turns = torch.floor(offset.detach() / (high - low))
    rest = offset - turns * (high - low)
    return torch.where(turns % 2 == 0, rest + low, high - rest)


Taps = list[tuple[Tensor, Any]]  # positions along one axis and their weights


def _nearest_tap(place: Tensor) -> Taps:
    return [(place.detach().round(), 1.0)]


def _linear_taps(place: Tensor) -> Taps:
    left = place.detach().floor()
    return [(left, left + 1 - place), (left + 1, place - left)]


def _cubic_taps(place: Tensor) -> Taps:
    left = place.detach().floor()
    t, a = place - left, -0.75

    def near(s: Tensor) -> Tensor:
        return ((a + 2) * s - (a + 3)) * s * s + 1

    def far(s: Tensor) -> Tensor:
        return ((a * s - 5 * a) * s + 8 * a) * s - 4 * a

    return [(left - 1, far(t + 1)), (left, near(t)), (left + 1, near(1 - t)), (left + 2, far(2 - t))]


def _tap(x: Tensor, corner: tuple[tuple[Tensor, Any], ...]) -> Tensor:
    """x at one position per axis times the product of the weights, zero outside of x."""
    space, (batch, channels) = x.shape[2:], x.shape[:2]
    places = [place.detach() for place, _ in corner]
    valid = torch.stack([(p >= 0) & (p < size) for p, size in zip(places, space, strict=True)]).all(0)
    flat = torch.zeros_like(places[0], dtype=torch.long)
    for place, size in zip(places, space, strict=True):
        flat = flat * size + torch.where(valid, place, 0.0).long()
    weight: Any = valid.to(x.dtype)
    for _, factor in corner:
        weight = weight * factor
    at = flat.reshape(batch, 1, -1).expand(batch, channels, -1)
    values = x.flatten(2).gather(2, at).unflatten(2, flat.shape[1:])
    return values * weight.unsqueeze(1)


composite(aten.grid_sampler_2d, sample)
composite(aten._grid_sampler_2d_cpu_fallback, sample)
composite(aten.grid_sampler_3d, sample)
composite(aten.cudnn_grid_sampler, lambda x, grid: sample(x, grid, _LINEAR, _ZEROS, True))

# -- dropout: one draw for the value and all rows -----------------------------------------------------------------


@jet_rule(aten.native_dropout.default, "linear")
def _native_dropout(pairs: PairSet, op: Any, x: Operand, p: float, train: bool | None) -> Any:
    y, mask = op(x.primal, p, train)
    if train is False:
        return Operand(y, x.tangent, x.second), mask
    factor = mask.to(y.dtype) * (0.0 if p == 1 else 1 / (1 - p))
    return Operand(y, *(None if rows is None else rows * factor for rows in (x.tangent, x.second))), mask


@jet_rule(aten._fused_dropout.default, "linear")
def _fused_dropout(pairs: PairSet, op: Any, x: Operand, keep: float, generator: Any = None) -> Any:
    y, mask = op(x.primal, keep, generator)
    factor = mask.to(y.dtype) / keep
    return Operand(y, *(None if rows is None else rows * factor for rows in (x.tangent, x.second))), mask


# -- bags of embeddings -------------------------------------------------------------------------------------------

_SUM, _MEAN, _MAX = range(3)


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    if scale_grad_by_freq:
        raise UnsupportedProgram(
            "embedding_bag(scale_grad_by_freq=True) has a gradient that is not its derivative; expected False."
        )
    scales = None if per_sample_weights is None else per_sample_weights.detach()
    real, *others = aten._embedding_bag(
        weight.detach(), indices, offsets, False, mode, False, scales, include_last_offset, padding_idx
    )
    if mode == _MAX:
        chosen = others[2].long()
        filled = (others[1][: real.shape[0]] > 0).unsqueeze(-1)
        return torch.where(filled, weight.gather(0, torch.where(filled, chosen, 0)), 0.0), *others
    return bag_sums(weight, indices, offsets, len(real), mode, per_sample_weights, padding_idx), *others


def bag_sums(
    weight: Tensor, indices: Tensor, offsets: Tensor, count: int, mode: int, scales: Tensor | None, padding_idx: int
) -> Tensor:
    """The sum or mean of the vectors of each of ``count`` bags; a bag starts at its offset."""
    places = torch.arange(indices.numel(), device=indices.device, dtype=offsets.dtype)
    bags = torch.searchsorted(offsets.contiguous(), places, right=True) - 1
    factor: Any = (indices != padding_idx).to(weight.dtype)
    zeros = weight.new_zeros((count, weight.shape[1]))
    if mode == _MEAN:
        counts = zeros[:, 0].index_add(0, bags, factor)
        factor = factor / counts.clamp(min=1)[bags]
    if scales is not None:
        factor = factor * scales
    return zeros.index_add(0, bags, weight.index_select(0, indices) * factor.unsqueeze(-1))


composite(aten._embedding_bag, _embedding_bag)
composite(aten._embedding_bag_forward_only, _embedding_bag)

# -- recurrent cells, as CUDA runs them without cuDNN -------------------------------------------------------------


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if input_bias is not None and hidden_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    (ir, ii, new), (hr, hi, hn) = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    r, i = (ir + hr).sigmoid(), (ii + hi).sigmoid()
    n = (new + r * hn).tanh()
    return n + i * (hx - n), torch.cat([r, i, n, hx, hn], 1)


composite(aten._thnn_fused_lstm_cell, _lstm_cell)
composite(aten._thnn_fused_gru_cell, _gru_cell)

# -- distances ----------------------------------------------------------------------------------------------------


def distances(a: Tensor, b: Tensor, p: float, compute_mode: int | None = None) -> Tensor:
    """All p-norms of differences of a row of a and a row of b."""
    return _distance(a.unsqueeze(-2) - b.unsqueeze(-3), p)


def pairwise_distances(x: Tensor, p: float = 2.0) -> Tensor:
    """The p-norms of differences of two rows of x, the first before the second."""
    i, j = torch.triu_indices(len(x), len(x), 1, device=x.device)
    return _distance(x.index_select(0, i) - x.index_select(0, j), p)


def _distance(difference: Tensor, p: float) -> Tensor:
    if difference.shape[-1] == 0 or difference.numel() == 0:
        return difference.sum(-1)
    return torch.linalg.vector_norm(difference, p, -1)


composite(aten._cdist_forward, distances)
composite(aten._pdist_forward, pairwise_distances)
composite(aten._euclidean_dist, lambda a, b: distances(a, b, 2.0))
