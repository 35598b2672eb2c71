r"""The axes of a weight's gradient along which its entries are not correlated: where Adam's scales mean most.

The gradient of a weight (out, in) is a sum over samples of derivatives at the layer's output times the layer's input.
The noise of a forward gradient is in the derivatives, and much the same for all outputs, so in the weight's gradient
its covariance is that of the inputs, whose entries are far from uncorrelated: most of the noise lies along a few
directions. Scales for single entries cannot tell these from the others. Along the eigenvectors of E[G^T G] they can,
and what has little noise is not held back by what has much. It is SOAP's rotation [1]_, of the inputs' side alone.

The axes Q are a continuous function of the moment M and of the axes before: each refresh is some steps of orthogonal
iteration, the Q of QR((M + shift) Q). The eigenvectors themselves are not: where eigenvalues meet, as those of zero do
while there were fewer gradients than inputs, a rounding error chooses among all axes of their space, and training would
differ between machines from its first step. With the shift the axes of small eigenvalues stay what they were.

.. [1] Vyas et al., SOAP: improving and stabilizing Shampoo using Adam, 2024.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["affordable", "away", "back", "floored", "fresh", "is_due", "refresh", "see"]

log = logging.getLogger("jetplane")

_WIDEST = 1024  # inputs; more of them keep their own axes
_LEAST, _TIMES = 1 << 24, 4  # numbers of all moments and axes: that many, or so many times the parameters
_ITERATIONS = 2  # of each refresh
_SMALLEST = 1e-5  # scale, of the largest one of its output
_SHIFT = 1e-3  # of the trace of the moment: axes that have less of it than that are hardly turned

State = Mapping[str, Any]  # of a parameter


def fresh(leaf: Tensor) -> dict[str, Tensor]:
    """What is kept for a weight (out, in...): the mean of G^T G, and the axes. Nothing for other parameters."""
    count = _inputs(leaf)
    if not count:
        return {}
    none = leaf.detach().new_zeros(count, count)
    return {"moment": none, "basis": torch.eye(count, dtype=leaf.dtype, device=leaf.device)}


def _inputs(leaf: Tensor) -> int:
    """Those of a weight that has axes of its own; 0 for other parameters."""
    if leaf.ndim < 2 or not leaf.numel() or leaf.dtype not in (torch.float32, torch.float64):
        return 0
    count = leaf.numel() // leaf.shape[0]
    return count if 1 < count <= _WIDEST else 0


def affordable(leaves: Sequence[Tensor]) -> set[int]:
    """The places of the parameters that have axes: all weights of at most 1024 inputs, or those with the fewest.

    A moment and the axes are two matrices as wide as the weight has inputs, whatever its outputs: for many narrow ones,
    as adapters of rank 8 are, they would be hundreds of times what they are for.

    Example:
        >>> sorted(affordable([torch.zeros(10, 4), torch.zeros(4), torch.zeros(10, 2000)]))
        [0]
    """
    left = max(_LEAST, _TIMES * sum(leaf.numel() for leaf in leaves))
    sizes = {place: _inputs(leaf) for place, leaf in enumerate(leaves)}
    wanted = sorted((count, place) for place, count in sizes.items() if count)
    found = set[int]()
    for count, place in wanted:
        left -= 2 * count * count
        if left < 0:
            break
        found.add(place)
    if len(found) < len(wanted):
        log.info(
            "%d of %d weights keep Adam's own axes: their moments are too large", len(wanted) - len(found), len(wanted)
        )
    return found


def see(state: State, grad: Tensor, share: Tensor, taken: Tensor, summed: Callable[[Tensor], Tensor]) -> None:
    """Take a gradient into the mean, with a weight of ``share``, if the step is ``taken``.

    Of some rows of a gradient here, ``summed`` adds what others have of the rest.
    """
    if "moment" in state:
        rows, moment = grad.flatten(1), state["moment"]
        found = summed(rows.T @ rows)
        taken = taken & torch.isfinite(found).all()  # a finite gradient may have a square that is not
        moment.lerp_(torch.where(taken, found, moment), share.to(moment))


def is_due(measured: int) -> bool:
    """Whether the axes are found anew, at which measurement of the path: at first always, then four times a doubling.

    Example:
        >>> [count for count in range(33) if is_due(count)]
        [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32]
    """
    return measured > 0 and measured % (1 << max(0, measured.bit_length() - 3)) == 0


def refresh(state: State) -> None:
    """Turn the axes towards the eigenvectors, and Adam's mean with them. Adam's scales stay with their axes."""
    if "basis" in state:
        mean = back(state, state["exp_avg"])
        order, basis = _turned(state["moment"].to(torch.float64), state["basis"].to(torch.float64))
        state["basis"].copy_(basis)
        state["exp_avg"].copy_(away(state, mean))
        square = state["exp_avg_sq"]
        square.copy_(square.flatten(1)[:, order].view_as(square))


def _turned(moment: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The axes after steps of orthogonal iteration, the longest first, and which ones they were before."""
    lengths = ((moment @ basis) * basis).sum(0)
    order = lengths.argsort(descending=True, stable=True)
    basis = basis[:, order]
    total = moment.diagonal().sum()
    weights = moment / torch.where(total > 0, total, 1.0)
    for _ in range(_ITERATIONS):
        basis, upper = torch.linalg.qr(weights @ basis + _SHIFT * basis)
        basis = basis * torch.where(upper.diagonal() < 0, -1.0, 1.0)  # QR leaves the signs open
    return order, basis


def away(state: State, values: Tensor) -> Tensor:
    """A weight's values along the axes."""
    return (values.flatten(1) @ state["basis"]).view_as(values) if "basis" in state else values


def back(state: State, values: Tensor) -> Tensor:
    """The inverse of :func:`away`."""
    return (values.flatten(1) @ state["basis"].T).view_as(values) if "basis" in state else values


def floored(state: State, sizes: Tensor) -> Tensor:
    """Adam's scales along the axes, none of them tiny beside the others of its output.

    A gradient has nothing but rounding errors along the axes of an input that is zero, and little more where there were
    fewer gradients than inputs: divided by their size, they would be as long a step as any.
    """
    if "basis" not in state:
        return sizes
    least = _SMALLEST * sizes.flatten(1).amax(1)
    return torch.maximum(sizes, least.view(-1, *(1,) * (sizes.ndim - 1)))
