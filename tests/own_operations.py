"""Operations that torch does not have, for rules of tests; the fixture ``clean_table`` takes those out again."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("jptest::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


@torch.library.custom_op("jptest::power", mutates_args=())
def power(x: Tensor, n: int, scale: float = 1.0) -> Tensor:
    return scale * x**n


@torch.library.custom_op("jptest::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@torch.library.custom_op("jptest::mix", mutates_args=())
def mix(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    return a + weight * b


@torch.library.custom_op("jptest::outer", mutates_args=())
def outer(a: Tensor, b: Tensor) -> Tensor:
    return torch.outer(a, b)


@torch.library.custom_op("jptest::steps", mutates_args=())
def steps(x: Tensor) -> Tensor:
    return x.round()


@torch.library.custom_op("jptest::two", mutates_args=())
def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.cos()


@torch.library.custom_op("jptest::largest", mutates_args=())
def largest(x: Tensor) -> Tensor:
    return x.argmax()


@torch.library.custom_op("jptest::bump", mutates_args={"x"})
def bump(x: Tensor) -> None:
    x.add_(1)


# vmap must be able to lift the linear and the bilinear ones
doubled.register_vmap(lambda info, dims, x: (2 * x, dims[0]))
mix.register_vmap(
    lambda info, dims, a, b, w: (
        (a if dims[0] is not None else a[None]) + w * (b if dims[1] is not None else b[None]),
        0,
    )
)


@outer.register_vmap
def _(info, dims, a, b):
    a, b = (t if d is not None else t.expand(info.batch_size, *t.shape) for t, d in zip((a, b), dims, strict=True))
    return a[:, :, None] * b[:, None, :], 0


OPS = [
    getattr(torch.ops.jptest, name)
    for name in ("cube", "power", "doubled", "mix", "outer", "steps", "two", "largest", "bump")
]
