"""The program whose gradient is wanted, as each pass calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ad import _torch
from ...ad.engine.guards import guarded
from ...ad.run.auxiliary import split_aux, told
from ...compiler.capture import identity
from .watch import WatchMode

__all__ = ["LossProgram"]


@dataclass(frozen=True, eq=False)
class LossProgram:
    """A function that returns losses (B,) or (B, ...), or those and something else."""

    loss_fn: Callable[..., Any]
    batch: Sequence[Any]
    has_aux: bool

    def __call__(self) -> tuple[Tensor, Any]:
        """The losses, and what came with them."""
        out, aux = split_aux(self.loss_fn(*self.batch), self.has_aux, "loss_fn", "losses")
        if not isinstance(out, Tensor):
            raise TypeError(f"loss_fn returned {told(out)}; expected a tensor of losses (B,).")
        if out.ndim and out.shape[0] == 0:
            raise ValueError(
                f"loss_fn returned no loss, {tuple(out.shape)}; expected at least one sample in a batch (the last "
                "one of a sampler may be empty)."
            )
        if out.ndim == 0 or not out.is_floating_point():
            raise ValueError(
                f"loss_fn returned {out.dtype} of shape {tuple(out.shape)}; expected one loss for each sample, (B,): "
                "reduction='none', and no mean. For a loss that is one number there is GaussNewtonSearch."
            )
        return out, aux

    def under(self, mode: WatchMode) -> tuple[Tensor, Any]:
        """The same, watched, with autograd off."""
        with torch.no_grad(), guarded(mode):
            return self()

    @property
    def identity(self) -> tuple[Any, ...]:
        """Of the function's code and the batch's form, by which it is known that samples can be taken apart."""
        return identity(self.loss_fn), self.form

    @property
    def form(self) -> tuple[Any, ...]:
        """What has to be equal for a plan to be worth a try."""
        leaves, structure = _torch.pytree.tree_flatten(list(self.batch))
        return structure, *(
            (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves
        )
