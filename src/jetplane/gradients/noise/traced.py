"""Operations of a traced estimate: signs, by a kernel on CUDA and the counter elsewhere; copies for a second pass."""

from __future__ import annotations

import torch
from torch import Tensor

from ...directions.counter import signed
from ...directions.traced import fast
from . import signs as plain

__all__ = ["again", "rows"]


def rows(
    seed: int | Tensor,
    step: int | Tensor,
    place: int,
    start: int,
    stop: int,
    like: Tensor,
    first: int | Tensor | None = None,
) -> Tensor:
    """Rows start to stop - 1 of the signs of a site, (stop - start, *S): those of ``signs.Signs``, bit by bit.

    ``like`` may be a part of a longer row, of which ``first`` elements come before it.
    """
    words = [
        word if isinstance(word, Tensor) else torch.full((), signed(word), dtype=torch.int64, device=like.device)
        for word in (seed, step)
    ]
    if isinstance(first, int):
        first = torch.full((), first, dtype=torch.int64, device=like.device)
    found = torch.ops.jetplane.signs(*words, first, place, start, stop, like.numel(), like.dtype)
    return found.reshape(stop - start, *like.shape)


def again(tensor: Tensor, after: Tensor | None = None) -> Tensor:
    """A copy that a compiler takes for another tensor, and makes once there is ``after``.

    It would keep what the first pass has computed for the second one, all activations and all noise: the memory that
    two passes are there to save. And it would draw all noise, and carry all chunks of tangents, at once.
    """
    copied: Tensor = torch.ops.jetplane.again(tensor, after)
    return copied


# Not a custom_op: it has no derivative, as the operation of the directions.
_LIBRARY = torch.library.Library("jetplane", "FRAGMENT")
_LIBRARY.define(
    "signs(Tensor seed, Tensor step, Tensor? first, SymInt place, SymInt start, SymInt stop, SymInt size, "
    "ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _signs(
    seed: Tensor,
    step: Tensor,
    first: Tensor | None,
    place: int,
    start: int,
    stop: int,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    if fast(step.device):
        from . import signs_triton

        return signs_triton.signs(seed, step, first, place, start, stop, size, dtype)
    before = 0 if first is None else int(first)
    return plain.counted(int(seed) % (1 << 64), step, place, start, stop, size, dtype, before).contiguous()


def _again(tensor: Tensor, after: Tensor | None) -> Tensor:
    return tensor.clone()


_LIBRARY.define("again(Tensor tensor, Tensor? after) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("again", _again, "CompositeExplicitAutograd")
_LIBRARY.impl("signs", _signs, "CompositeExplicitAutograd")


@torch.library.register_fake("jetplane::signs", lib=_LIBRARY)
def _(
    seed: Tensor,
    step: Tensor,
    first: Tensor | None,
    place: int,
    start: int,
    stop: int,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    return step.new_empty((stop - start, size), dtype=dtype)


@torch.library.register_fake("jetplane::again", lib=_LIBRARY)
def _(tensor: Tensor, after: Tensor | None) -> Tensor:
    return torch.empty_like(tensor)
