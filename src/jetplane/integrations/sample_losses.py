r"""The losses of single samples, read off a program that returns their mean.

Trainers and models return one number. Forward gradients need the loss of each sample, for each gets noise of its own.
Where the number is

    loss = sum_i a_i mean_b l_ib,

with losses l_i of :mod:`torch.nn.functional` or means over tensors whose first axis is the samples, the same run gives
the rows sum_i a_i l_ib (B,), whose mean is the loss: reductions to "mean" or "sum" are watched, and so is what is
multiplied with, divided by or added to what they return.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..ad import _torch

__all__ = ["batch_size", "losses_of_samples"]

_LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"),
    *("binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss", "gaussian_nll_loss", "soft_margin_loss"),
    *("hinge_embedding_loss", "cosine_embedding_loss", "margin_ranking_loss", "triplet_margin_loss"),
    *("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss"),
)
_WEIGHTED = {functional.cross_entropy, functional.nll_loss}  # their mean is over the weights of the targets
_SCALED = {"mul", "multiply", "__mul__", "__rmul__", "__imul__", "mul_"}
_DIVIDED = {"div", "divide", "true_divide", "__truediv__", "__div__", "__itruediv__", "div_"}
_ADDED = {"add", "__add__", "__radd__", "__iadd__", "add_"}
_TAKEN = {"sub", "__sub__", "__isub__", "sub_"}
_SAME = {"to", "float", "double", "clone", "contiguous", "reshape", "view", "squeeze", "requires_grad_"}
_WANTED = (
    "a mean of losses of samples, as the losses of torch.nn.functional return it with reduction='mean' (scaled, or "
    "added up), or the losses themselves, (B,)"
)


def losses_of_samples(program: Callable[[], Any], samples: int | None = None) -> tuple[Tensor, Any]:
    """The losses of single samples (B,), whose mean is the program's loss, and what the program returned.

    ``program`` returns a loss, or a pair or mapping with the loss first or under "loss". Losses (B,) or (B, ...) are
    taken as they are, summed over the rest as a forward gradient does. ``samples`` is B, for programs that join the
    axes of samples and tokens.

    Example:
        >>> logits, labels = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, -100])
        >>> losses, loss = losses_of_samples(lambda: 0.5 * torch.nn.functional.cross_entropy(logits, labels))
        >>> torch.testing.assert_close(losses.mean(), loss)
        >>> losses.shape, float(losses[-1])
        (torch.Size([6]), 0.0)
    """
    watch = _Means(samples)
    with watch:
        returned = program()
    loss = loss_in(returned)
    if loss.ndim:
        return loss, returned
    rows = watch.rows_of(loss)
    if rows is None:
        raise ValueError(
            f"the loss is one number, {loss.item():.6g}, and how the samples make it cannot be seen; expected "
            f"{_WANTED}."
        )
    return rows, returned


def loss_in(returned: Any) -> Tensor:
    """The loss among what a program returned."""
    loss = returned
    if isinstance(returned, Mapping):
        loss = returned.get("loss")
    elif isinstance(returned, tuple | list) and returned:
        loss = returned[0]
    if not isinstance(loss, Tensor):
        raise TypeError(f"the program returned {type(returned).__name__} without a loss; expected a tensor.")
    return loss


def batch_size(batch: Any) -> int | None:
    """The first axis of a batch's first tensor that has one."""
    tensors = (leaf for leaf in _torch.pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim)
    return next((len(tensor) for tensor in tensors), None)


class _Means(TorchFunctionMode):
    """Remembers for each number that is a mean of samples what it is the mean of."""

    def __init__(self, samples: int | None) -> None:
        super().__init__()
        self._samples = samples
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}  # by the number's id: the number, which is kept, and its rows

    def rows_of(self, number: Any) -> Tensor | None:
        found = self._rows.get(id(number))
        return found[1] if found is not None and found[0] is number else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        loss = func in _signatures()
        if loss:
            rows, out = self._reduced(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
            rows = self._followed(func, args, kwargs, out) if isinstance(out, Tensor) and not out.ndim else None
        if rows is not None:
            self._rows[id(out)] = out, rows
        return out

    def _reduced(self, func: Any, args: Any, kwargs: Any) -> tuple[Tensor | None, Any]:
        """A loss with its reduction, and without it."""
        given = _signatures()[func].bind(*args, **kwargs)
        given.apply_defaults()
        named = given.arguments
        reduction = named["reduction"]
        old = named.get("size_average") is not None or named.get("reduce") is not None
        if old or reduction not in ("mean", "sum", "batchmean"):
            return None, func(*args, **kwargs)
        named["reduction"] = "none"
        entries = func(*given.args, **given.kwargs)  # as the loss does, which is what its reduction is taken of
        count = _counted(func, named, entries, reduction)
        out = entries.sum() if count is None else entries.sum() / count
        rows = self._per_sample(entries, 1.0 if count is None else 1.0 / count)
        return rows, out

    def _per_sample(self, entries: Tensor, scale: Any) -> Tensor | None:
        """Rows whose mean is ``entries.sum() * scale``; None where no axis is the samples'."""
        samples = self._samples
        if not entries.ndim or (samples and entries.numel() % samples):
            return None
        rows = entries.reshape(samples if samples and len(entries) != samples else len(entries), -1).sum(1)
        return rows * (scale * len(rows))

    def _followed(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Tensor | None:
        """The rows of a number that was computed from others, or is the mean or sum of a tensor."""
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if name in ("mean", "sum") and len(args) == 1 and not set(kwargs) - {"dtype"} and isinstance(first, Tensor):
            known = self.rows_of(first)
            scale = 1.0 / first.numel() if name == "mean" and first.numel() else 1.0
            return known if not first.ndim else self._per_sample(first, scale)
        rows = self.rows_of(first)
        if name in _SAME:
            return rows if rows is None or rows.dtype == out.dtype else rows.to(out.dtype)
        if len(args) != 2 or kwargs:
            return None
        return self._combined(name, rows, self.rows_of(args[1]), args)

    def _combined(self, name: str, one: Tensor | None, other: Tensor | None, args: Any) -> Tensor | None:
        """The rows of a product with a constant, or of a sum."""
        if name in _SCALED and (one is None) != (other is None):
            return one * args[1] if one is not None else other * args[0]
        if name in _DIVIDED and one is not None and other is None:
            return one / args[1]
        if name not in _ADDED | _TAKEN or (one is None and other is None):
            return None
        a, b = args[0] if one is None else one, args[1] if other is None else other
        if one is not None and other is not None and one.shape != other.shape:
            return None
        return a + b if name in _ADDED else a - b


def _counted(func: Any, named: Mapping[str, Any], entries: Tensor, reduction: str) -> Any:
    """What the sum of a loss's entries is divided by; None: by nothing."""
    if reduction == "sum":
        return None
    if reduction == "batchmean":
        return len(named["input"])
    target = named.get("target")
    if func not in _WEIGHTED or not isinstance(target, Tensor) or target.is_floating_point():
        return entries.numel()
    counted = target != named["ignore_index"]
    weight = named.get("weight")
    if weight is None:
        return counted.sum()
    return (weight[target.where(counted, 0)] * counted).sum()


@cache
def _signatures() -> dict[Any, inspect.Signature]:
    """The losses of torch that have a reduction."""
    return {getattr(functional, name): inspect.signature(getattr(functional, name)) for name in _LOSSES}
