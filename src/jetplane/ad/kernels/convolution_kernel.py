"""The jet of a convolution as one operation of a traced program: a kernel on CUDA, plain convolutions elsewhere."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..algebra.jet import Operand, PairSet
from .halves import halves

__all__ = [
    "ENABLED",
    "FEWEST",
    "channels_last",
    "convolution_jet",
    "convolved",
    "factors",
    "fits",
    "lengths",
    "padded",
    "pays",
    "rounded",
    "stacked",
    "tf32",
    "usable",
]

# Set to False, or JETPLANE_CONVOLUTION_KERNEL=0 in the environment, to do without it.
ENABLED = os.environ.get("JETPLANE_CONVOLUTION_KERNEL", "1") == "1"

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_MOST = 16  # directions: groups of rows are written out in the kernel
_LONGEST = 2048  # numbers in a window; beyond, the library's products take so long that its sums do not count
FEWEST = 1 << 14  # positions of the output: about one program for each of an H200's multiprocessors


def pays(
    pairs: PairSet,
    x: Any,
    w: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    transposed: bool,
    fewest: int = 2,
) -> bool:
    """Whether there is a kernel for this jet, and it is likely to be faster than the library.

    Both factors have tangents and all pairs are wanted, of ``fewest`` directions or more. Channels come 16 bytes at a
    time, and at least 7 of 10 channels in a block of 64 are there.
    """
    if not (isinstance(x, Operand) and isinstance(w, Operand)) or groups != 1 or transposed:
        return False
    value, kernel = x.primal, w.primal
    if x.tangent is None or w.tangent is None or w.second is not None or pairs.weights is not None:
        return False
    if pairs.pairs != PairSet.all(pairs.k).pairs or not fewest <= pairs.k <= _MOST or not usable(value, kernel):
        return False
    size = [n + 2 * more for n, more in zip(value.shape[2:], padding, strict=True)]
    out = (value.shape[0], *lengths(size, kernel.shape[2:], stride, dilation), kernel.shape[0])
    return (
        kernel.shape[1] % 4 == 0
        and math.prod(out[:3]) >= FEWEST
        and out[3] >= 0.7 * 64 * math.ceil(out[3] / 64)
        and fits(value, padding, out)
    )


def usable(value: Tensor, kernel: Tensor) -> bool:
    """Whether a convolution is one that there are kernels for, whatever of it varies.

    Products are TF32's, on a device with matrix instructions of whole warp groups, and windows not too long.
    """
    return (
        ENABLED
        and _HAS_TRITON
        and value.device.type == "cuda"
        and value.ndim == kernel.ndim == 4
        and value.dtype == kernel.dtype == torch.float32
        and tf32()
        and torch.cuda.get_device_capability(value.device)[0] == 9
        and math.prod(kernel.shape[1:]) <= _LONGEST
    )


def fits(value: Tensor, padding: Sequence[int], out: Sequence[int]) -> bool:
    """Whether rows of x (N, C, H, W) and of the output (N, ..., O) can be numbered in 31 bits."""
    n, channels, height, width = value.shape
    size = n * channels * (height + 2 * padding[0]) * (width + 2 * padding[1])
    return max(size, 4 * math.prod(out)) < 1 << 31  # of a pooled output, that is four times as large before


def tf32() -> bool:
    """Whether float32 convolutions may use TF32."""
    backend: Any = torch.backends.cudnn
    return backend.conv.fp32_precision == "tf32"


def convolution_jet(
    x: Operand, w: Operand, bias: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Operand:
    """The jet of a 2D convolution for all pairs, value and rows from one operation, channels last in memory."""
    if x.tangent is None or w.tangent is None:
        raise ValueError("a factor of the convolution has no tangents; expected some on both.")
    left = padded(channels_last(x.primal, x.tangent), padding)
    right = channels_last(w.primal, w.tangent)
    second = None if x.second is None else padded(x.second.permute(0, 1, 3, 4, 2), padding).contiguous()
    out = torch.ops.jetplane.convolution_jet(*factors(left, right, second), stacked(bias, w), stride, dilation)
    rows, k = out.permute(0, 1, 4, 2, 3), x.tangent.shape[0]
    # a value of its own: what the engine keeps of a tensor is as large as the memory that the tensor is a part of
    value, tangent, pairs = rows[0].clone(), rows[1 : k + 1], rows[k + 1 :]
    if isinstance(bias, Operand) and bias.second is not None:
        pairs = pairs + bias.second.reshape(pairs.shape[0], 1, -1, 1, 1)
    return Operand(value, tangent, pairs)


def factors(x: Tensor, w: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """What the operation takes of rows: in TF32's place float16 with scales, which has as many bits."""
    return halves(x, w, second) if x.dtype == torch.float32 and tf32() else (x, w, second, None)


def channels_last(primal: Tensor, tangent: Tensor) -> Tensor:
    """Rows (1 + K, ..., height, width, channels) of a value (..., channels, height, width) and its tangents."""
    return torch.cat([primal.permute(0, 2, 3, 1).unsqueeze(0), tangent.permute(0, 1, 3, 4, 2)]).contiguous()


def padded(rows: Tensor, padding: Sequence[int]) -> Tensor:
    """Rows (..., height, width, channels) with zeros around: a part of the copy that put them in order."""
    down, across = padding
    return torch.nn.functional.pad(rows, (0, 0, across, across, down, down)) if down or across else rows


def stacked(bias: Any, w: Operand) -> Tensor | None:
    """Rows (1 + K, channels) of the bias and its tangents."""
    if bias is None or w.tangent is None:
        return None
    value = bias.primal if isinstance(bias, Operand) else bias
    tangent = bias.tangent if isinstance(bias, Operand) else None
    if tangent is None:
        tangent = value.new_zeros((w.tangent.shape[0], *value.shape))
    return torch.cat([value.unsqueeze(0), tangent])


def rounded(x: Tensor) -> Tensor:
    """Float32 numbers rounded to the nearest of TF32, where the matrix unit itself would cut off.

    Example:
        >>> float(rounded(torch.tensor(1 + 2**-11 + 2**-20))) == 1 + 2**-10
        True
    """
    high = x * 8193.0  # 2^13 + 1: the sum keeps the 11 leading bits
    return high - (high - x)


@torch.library.custom_op("jetplane::convolution_jet", mutates_args=())
def _operation(
    x: Tensor,
    w: Tensor,
    second: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Rows (pairs of T, N, OH, OW, O) from x (T, N, H, W, C), w (T, O, height, width, C), second rows, bias (T, O).

    Row (i, j) of ``PairSet.all(T)`` is x_i * w_j + x_j * w_i: with the values as rows 0, the value is row (0, 0), the
    tangents are the rows (0, j), and the pairs the rest. ``scale`` is what :func:`halves` has made of the factors.
    """
    if x.is_cuda and _HAS_TRITON:
        from .convolution_triton import convolve

        return convolve(x, w, second, scale, bias, stride, dilation, _shape(x, w, stride, dilation))
    rows = x.shape[0]
    if scale is not None:
        left, right, pairs = scale.split([rows, rows, len(scale) - 2 * rows])
        x, w = _scaled(x, left), _scaled(w, right)
        second = None if second is None else _scaled(second, pairs)

    def product(one: Tensor, other: Tensor) -> Tensor:
        return convolved(one, other, stride, dilation)

    out = []
    for number, (i, j) in enumerate(PairSet.all(rows).pairs):
        row = product(x[i], w[j])
        if j > 0:
            row = row + product(x[j], w[i])
        if i > 0 and second is not None:
            row = row + product(second[number - rows], w[0])
        if i == 0 and bias is not None:
            row = row + bias[j]
        out.append(row)
    return torch.stack(out)


@_operation.register_fake
def _(
    x: Tensor,
    w: Tensor,
    second: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    rows = x.shape[0]
    made = x if scale is None else scale
    return made.new_empty((rows * (rows + 1) // 2, *_shape(x, w, stride, dilation)))


def _scaled(rows: Tensor, scale: Tensor) -> Tensor:
    return rows * scale.reshape(-1, *[1] * (rows.ndim - 1))


def _shape(x: Tensor, w: Tensor, stride: Sequence[int], dilation: Sequence[int]) -> tuple[int, int, int, int]:
    """The shape (N, OH, OW, O) of the output."""
    height, width = lengths(x.shape[2:4], w.shape[2:4], stride, dilation)
    return x.shape[1], height, width, w.shape[1]


def convolved(x: Tensor, w: Tensor, stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """The convolution of x (N, H, W, C) with w (O, height, width, C), channels last."""
    x, w = x.movedim(-1, 1), w.movedim(-1, 1)
    return torch.nn.functional.conv2d(x, w, None, stride, 0, dilation).movedim(1, -1)


def lengths(
    size: Sequence[int], window: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[int, int]:
    """Height and width of what windows over ``size`` give."""
    height, width = ((size[n] - dilation[n] * (window[n] - 1) - 1) // stride[n] + 1 for n in (0, 1))
    return height, width
