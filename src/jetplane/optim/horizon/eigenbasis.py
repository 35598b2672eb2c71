r"""The axes of a weight's gradient along which its entries are not correlated: where Adam's scales mean most.

The gradient of a weight (out, in) is a sum over samples of derivatives at the layer's output times the layer's input.
The noise of a forward gradient is in the derivatives, and much the same for all outputs, so in the weight's gradient
its covariance is that of the inputs, whose entries are far from uncorrelated: most of the noise lies along a few
directions. Scales for single entries cannot tell these from the others. Along the eigenvectors of E[G^T G] they can,
and what has little noise is not held back by what has much. It is SOAP's rotation [1]_, of the inputs' side alone.

The axes Q are a continuous function of the moment M and of the axes before: each refresh is some steps of orthogonal
iteration, the Q of QR((M + shift) Q), by products and Cholesky factors. The eigenvectors themselves are not: where
eigenvalues meet, as those of zero do while there were fewer gradients than inputs, a rounding error chooses among all
axes of their space, and training would differ between machines from its first step. With the shift the axes of small
eigenvalues stay what they were.

.. [1] Vyas et al., SOAP: improving and stabilizing Shampoo using Adam, 2024.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .bunches import finite

__all__ = ["affordable", "away", "back", "floored", "fresh", "held", "is_due", "refresh", "see"]

log = logging.getLogger("jetplane")

_WIDEST = 1024  # inputs; more of them keep their own axes
_LEAST, _TIMES = 1 << 24, 4  # numbers of all moments and axes: that many, or so many times the parameters
_ITERATIONS = 2  # of each refresh
_AT_ONCE = 1 << 25  # bytes of axes that are turned together, unless those of one weight have more
_SMALLEST = 1e-4  # scale, of the largest one of its output
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


def see(
    states: Sequence[State],
    grads: Sequence[Tensor],
    share: Tensor,
    taken: Tensor,
    summed: Sequence[Callable[[Tensor], Tensor]] | None = None,
) -> None:
    """Take gradients of a bunch into the means, with a weight of ``share``, if the step is ``taken``.

    Of some rows of a gradient here, its ``summed`` adds what others have of the rest.
    """
    sums = [_here] * len(states) if summed is None else summed
    seen = [
        (state["moment"], add, grad.flatten(1))
        for state, grad, add in zip(states, grads, sums, strict=True)
        if "moment" in state
    ]
    if not seen:
        return
    found = [add(rows.T @ rows) for _, add, rows in seen]
    known = (taken & finite(found)).unbind()  # a finite gradient may have a square that is not
    share = share.to(found[0])
    for (moment, *_), one, at_hand in zip(seen, found, known, strict=True):
        moment.lerp_(torch.where(at_hand, one, moment), share)


def _here(found: Tensor) -> Tensor:
    return found


def held(state: State) -> int:
    """Bytes of what a gradient adds to the mean."""
    return int(state["moment"].nbytes) if "moment" in state else 0


def is_due(measured: int) -> bool:
    """Whether the axes are found anew, at which measurement of the path: at first always, then four times a doubling.

    Example:
        >>> [count for count in range(33) if is_due(count)]
        [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32]
    """
    return measured > 0 and measured % (1 << max(0, measured.bit_length() - 3)) == 0


def refresh(states: Iterable[State]) -> None:
    """Turn the axes towards the eigenvectors, and Adam's mean with them. Adam's scales stay with their axes.

    Those of one width are turned together.
    """
    by_kind: dict[Any, list[State]] = {}
    for state in states:
        if "basis" in state:
            basis = state["basis"]
            by_kind.setdefault((basis.shape, basis.dtype, basis.device), []).append(state)
    for (shape, _, _), alike in by_kind.items():
        count = max(1, _AT_ONCE // (8 * shape.numel()))
        for first in range(0, len(alike), count):
            _refresh(alike[first : first + count])


def _refresh(states: Sequence[State]) -> None:
    moments, bases = (torch.stack([state[name] for state in states]).double() for name in ("moment", "basis"))
    orders, turned = _turned(moments, bases)
    for state, order, basis in zip(states, orders.unbind(), turned.unbind(), strict=True):
        mean = back(state, state["exp_avg"])
        state["basis"].copy_(basis)
        state["exp_avg"].copy_(away(state, mean))
        square = state["exp_avg_sq"]
        square.copy_(square.flatten(1)[:, order].view_as(square))


def _turned(moments: Tensor, bases: Tensor) -> tuple[Tensor, Tensor]:
    """The axes (N, n, n) after steps of orthogonal iteration, the longest first, and which ones they were before."""
    lengths = ((moments @ bases) * bases).sum(-2)
    orders = lengths.argsort(dim=-1, descending=True, stable=True)
    start = bases.gather(-1, orders.unsqueeze(-2).expand_as(bases))
    total = moments.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    weights, found = moments / torch.where(total > 0, total, 1.0), start
    for _ in range(_ITERATIONS):
        found = _straightened(weights @ found + _SHIFT * found)
    found = _straightened(found)
    # what could not be factorised is not finite: then the axes stay, in their new order
    return orders, torch.where(torch.isfinite(found).all(-1).all(-1)[:, None, None], found, start)


def _straightened(columns: Tensor) -> Tensor:
    """Columns A as A / R with R^T R = A^T A, by Cholesky: the Q of their QR, but for a rounding times the square of
    their condition, which is about 1e3 at most. Done to the result once more, whose condition is near 1, that is gone.

    Each column is a sum of those before it and itself, so nothing is lost where it is done once: the next product has
    the same Q. A QR by reflections would take n products of a matrix and a vector, one after the other.
    """
    factor, failed = torch.linalg.cholesky_ex(columns.mT @ columns)
    found = torch.linalg.solve_triangular(factor.mT, columns, upper=True, left=False)
    return torch.where((failed == 0)[:, None, None], found, torch.nan)


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
