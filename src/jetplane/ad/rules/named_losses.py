"""Losses of torch.nn.functional: where one is called, the model ends and the loss begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import functional as F

from .. import _torch

__all__ = ["LOSSES", "Loss"]


@dataclass(frozen=True)
class Loss:
    """A loss of torch.nn.functional.

    ``heads``: a softmax or sigmoid whose output it is given belongs to it. ``logarithms``: it expects logarithms of
    probabilities, and has no positive curvature without the normalisation that made them.
    """

    name: str
    heads: bool = False
    logarithms: bool = False

    def argument(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the loss is given of the model."""
        return args[0] if args else kwargs.get("input", kwargs.get("log_probs"))


_NAMES = (
    *("cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"),
    *("poisson_nll_loss", "gaussian_nll_loss", "soft_margin_loss", "multilabel_soft_margin_loss"),
    *("multilabel_margin_loss", "multi_margin_loss", "margin_ranking_loss", "hinge_embedding_loss"),
    *("cosine_embedding_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss"),
)
_KINDS = (
    *(Loss(name) for name in _NAMES),
    *(Loss(name, heads=True, logarithms=True) for name in ("nll_loss", "kl_div", "ctc_loss")),
    Loss("binary_cross_entropy", heads=True),
)

LOSSES: dict[Any, Loss] = {
    function: loss for loss in _KINDS for function in (getattr(F, loss.name), *_torch.native_losses(loss.name))
}
