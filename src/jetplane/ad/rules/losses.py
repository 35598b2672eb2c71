"""Rules of losses; those that are missing here are programs of elementwise operations in torch's own table."""

from __future__ import annotations

import contextlib
import importlib
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import MissingRule, UnsupportedProgram
from ..algebra.families import chain, composite, jet_rule, primal_of
from ..algebra.jet import Operand, PairSet

aten = torch.ops.aten
_NONE, _MEAN, _SUM = range(3)
_NEVER = -1e30  # the logarithm of zero, but finite, so that no derivative is nan

# -- negative log likelihood: a gather over the classes -----------------------------------------------------------


@jet_rule(aten.nll_loss_forward.default, "linear")
@jet_rule(aten.nll_loss2d_forward.default, "linear")
def _nll_loss(pairs: PairSet, op: Any, x: Any, target: Tensor, weight: Any, reduction: int, ignore_index: int) -> Any:
    if isinstance(weight, Operand):
        raise MissingRule(f"the rule of {op} does not differentiate its argument 'weight', which is perturbed", str(op))
    y, mass = op(x.primal, target, weight, reduction, ignore_index)
    kept = target != ignore_index
    at = torch.where(kept, target, 0)
    factor = -(kept.to(y.dtype) if weight is None else kept * weight[at])
    axis = 1 if x.primal.ndim > 1 else 0
    at = at.unsqueeze(axis) if x.primal.ndim > 1 else at.reshape(1)

    def lift(rows: Tensor | None) -> Tensor | None:
        if rows is None:
            return None
        picked = rows.gather(axis + 1, at.expand(rows.shape[0], *at.shape)).squeeze(axis + 1) * factor
        if reduction == _NONE:
            return picked
        whole = picked.reshape(rows.shape[0], -1).sum(1)
        return whole if reduction == _SUM else whole / mass

    return Operand(y, lift(x.tangent), lift(x.second)), mass


# -- margins ----------------------------------------------------------------------------------------------------------


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    if reduction == _NONE:
        return loss
    return loss.mean() if reduction == _MEAN else loss.sum()


def _soft_margin_loss(x: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    margin = -target * x
    # torch's log1p(exp(margin)) overflows in its second derivative
    return _reduced(torch.logaddexp(margin, torch.zeros_like(margin)), reduction)


composite(aten.soft_margin_loss, _soft_margin_loss)


# -- binary cross entropy ---------------------------------------------------------------------------------------------

_LEAST = 1e-12  # torch's bound for x (1 - x), by which the derivatives are finite where a sigmoid is 0 or 1


@jet_rule(aten.binary_cross_entropy.default)
def _binary_cross_entropy(
    pairs: PairSet, op: Any, x: Any, target: Any, weight: Any = None, reduction: int = _MEAN
) -> Operand:
    """-t log x - (1 - t) log(1 - x), with the bound of torch's backward pass."""
    if isinstance(weight, Operand):
        raise MissingRule(f"the rule of {op} does not differentiate its argument 'weight', which is perturbed", str(op))
    p, t = primal_of(x), primal_of(target)
    spread = (p * (1 - p)).clamp(min=_LEAST)
    by_target = torch.log1p(-p).clamp(min=-100) - torch.log(p).clamp(min=-100)
    bent = (p * p - 2 * p * t + t) / spread**2
    hessian = {(0, 0): bent, (0, 1): -1 / spread} if pairs.rows else {}
    jet = chain(pairs, op(p, t, None, _NONE), [x, target], [(p - t) / spread, by_target], hessian)

    def reduced(rows: Tensor) -> Tensor:
        rows = rows if weight is None else rows * weight
        if reduction == _NONE:
            return rows
        rows = rows.reshape(rows.shape[0], -1)
        return rows.mean(1) if reduction == _MEAN else rows.sum(1)

    parts = [None if rows is None else reduced(rows) for rows in (jet.tangent, jet.second)]
    return Operand(op(p, t, weight, reduction), *parts)


# -- losses that are quadratic near zero ------------------------------------------------------------------------------

# Squares of the residual itself: torch's table squares its absolute value, whose derivative at zero is taken for zero.


def _huber_loss(x: Tensor, target: Tensor, reduction: int = _MEAN, delta: float = 1.0) -> Tensor:
    residual = x - target
    size = residual.abs()
    return _reduced(torch.where(size < delta, 0.5 * residual**2, delta * (size - 0.5 * delta)), reduction)


def _smooth_l1_loss(x: Tensor, target: Tensor, reduction: int = _MEAN, beta: float = 1.0) -> Tensor:
    residual = x - target
    size = residual.abs()
    if beta == 0:
        return _reduced(size, reduction)
    return _reduced(torch.where(size < beta, 0.5 * residual**2 / beta, size - 0.5 * beta), reduction)


composite(aten.huber_loss, _huber_loss)
composite(aten.smooth_l1_loss, _smooth_l1_loss)


def multilabel_margins(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """sum_jk max(0, 1 - x_j + x_k) / C over the targets j, which end at the first -1, and all classes k outside.

    For each example; and which classes are targets.
    """
    classes = x.shape[-1] if x.ndim else 1
    scores, labels = x.reshape(-1, classes), target.reshape(-1, classes)
    listed = (labels < 0).cumsum(1) == 0
    at = torch.where(listed, labels, 0)
    chosen = torch.zeros_like(labels).scatter_add(1, at, listed.long()) > 0
    margins = 1 - scores.gather(1, at).unsqueeze(2) + scores.unsqueeze(1)
    counted = listed.unsqueeze(2) & ~chosen.unsqueeze(1) & (margins > 0)
    return torch.where(counted, margins, 0.0).sum((1, 2)) / classes, chosen


def _multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    loss, chosen = multilabel_margins(x, target)
    return _reduced(loss.reshape(x.shape[:-1]), reduction), chosen.to(x.dtype).reshape(target.shape)


composite(aten.multilabel_margin_loss_forward, _multilabel_margin_loss)

# -- connectionist temporal classification ------------------------------------------------------------------------


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    real, log_alpha = aten._ctc_loss(log_probs.detach(), targets, input_lengths, target_lengths, blank, zero_infinity)
    loss = ctc(log_probs, targets, input_lengths, target_lengths, blank)
    return loss.reshape(real.shape), log_alpha


def _cudnn_ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int,
    deterministic: bool,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled():
        raise UnsupportedProgram(
            "cuDNN's ctc_loss computes its gradient ahead, without derivatives of it; expected targets of dtype int64 "
            "on the device, or torch.no_grad()."
        )
    return ctc(log_probs, targets, input_lengths, target_lengths, blank), torch.zeros_like(log_probs)


def _lengths(lengths: Any) -> list[int]:
    return lengths.reshape(-1).tolist() if isinstance(lengths, Tensor) else list(lengths)


def ctc(log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int) -> Tensor:
    """-log p(target) for each example, by the forward recursion over time in log space.

    The states are the labels with blanks between and around them; a state is reached from itself, from the one before,
    and from the label before that if it differs.
    """
    input_lengths, target_lengths = _lengths(input_lengths), _lengths(target_lengths)
    if log_probs.ndim == 2:
        log_probs = log_probs.unsqueeze(1)
    batch, device = log_probs.shape[1], log_probs.device
    labels = _padded(targets.to(device), target_lengths, batch)
    states = labels.new_full((batch, 2 * labels.shape[1] + 1), blank)
    states[:, 1::2] = labels
    skip = torch.zeros_like(states, dtype=torch.bool)
    skip[:, 3::2] = labels[:, 1:] != labels[:, :-1]
    emitted = log_probs.gather(2, states.expand(log_probs.shape[0], *states.shape))  # (T, N, states)
    places = torch.arange(states.shape[1], device=device)
    barred = torch.where(skip, 0.0, _NEVER).to(log_probs.dtype)
    alpha = torch.where(places < 2, emitted[0], _NEVER)
    lengths = torch.tensor(input_lengths, device=device).unsqueeze(1)
    for time in range(1, log_probs.shape[0]):
        before = F.pad(alpha, (1, 0), value=_NEVER)[:, :-1]
        twice = F.pad(alpha, (2, 0), value=_NEVER)[:, :-2] + barred
        step = torch.logsumexp(torch.stack([alpha, before, twice]), 0) + emitted[time]
        alpha = torch.where(time < lengths, step, alpha)
    last = 2 * torch.tensor(target_lengths, device=device).unsqueeze(1)
    ends = (places == last) | (places == last - 1)
    loss = -torch.logsumexp(torch.where(ends, alpha, _NEVER), 1)
    loss = torch.where(loss > -_NEVER / 2, math.inf, loss)
    # without any time step only the empty target is possible
    empty = torch.where(last > 0, math.inf, 0.0).to(loss.dtype).squeeze(1)
    return torch.where(lengths.squeeze(1) == 0, empty, loss)


def _padded(targets: Tensor, lengths: list[int], batch: int) -> Tensor:
    """Labels (N, longest) from padded or concatenated targets."""
    longest = max(lengths, default=0)
    if targets.ndim == 2:
        return targets[:, :longest].long()
    out = targets.new_zeros((batch, longest), dtype=torch.long)
    start = 0
    for index, length in enumerate(lengths):
        out[index, :length] = targets[start : start + length]
        start += length
    return out


composite(aten._ctc_loss.default, _ctc_loss)
composite(aten._ctc_loss.Tensor, _ctc_loss)
composite(aten._cudnn_ctc_loss.default, _cudnn_ctc_loss)
composite(aten._cudnn_ctc_loss.Tensor, _cudnn_ctc_loss)

# -- cross entropy of a linear layer, in chunks -------------------------------------------------------------------


def _linear_cross_entropy(
    x: Tensor,
    matrix: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    chunk: int,
    policy: str,
    dtype: Any,
    retain: bool,
    for_x: bool,
    for_matrix: bool,
    for_bias: bool,
) -> tuple[Tensor, ...]:
    """The loss and its gradients, which torch computes ahead."""
    if label_smoothing:
        raise MissingRule("linear_cross_entropy in chunks has no rule with label smoothing", "linear_cross_entropy")
    logits = F.linear(x, matrix, bias)
    kept = target != ignore_index
    factor = kept.to(x.dtype) if weight is None else kept * weight[torch.where(kept, target, 0)]
    factor = factor / factor.sum() if reduction == "mean" else factor
    loss = F.cross_entropy(logits, target, weight, reduction=reduction, ignore_index=ignore_index)
    empty = x.new_empty
    if not (for_x or for_matrix or for_bias):
        return loss, empty((0, 0)), empty((0, 0)), empty((0,))
    hot = F.one_hot(torch.where(kept, target, 0), logits.shape[1]).to(x.dtype)
    slope = (logits.softmax(1) - hot) * factor.unsqueeze(1)
    return (
        loss,
        slope @ matrix if for_x else empty((0, 0)),
        slope.mT @ x if for_matrix else empty((0, 0)),
        slope.sum(0) if for_bias else empty((0,)),
    )


def _linear_cross_entropy_each(
    x: Tensor, matrix: Tensor, target: Tensor, bias: Tensor | None, weight: Tensor | None, ignore_index: int, *rest: Any
) -> Tensor:
    return F.cross_entropy(F.linear(x, matrix, bias), target, weight, reduction="none", ignore_index=ignore_index)


with contextlib.suppress(ImportError):  # since torch 2.13; the module enters its operations when it is imported
    importlib.import_module("torch.nn.modules.linear_cross_entropy")
    composite(torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default, _linear_cross_entropy)
    composite(torch.ops.torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default, _linear_cross_entropy_each)
