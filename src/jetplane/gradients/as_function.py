"""A forward gradient as a function: what is known from call to call is found by the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict, Unpack, overload

from torch import Tensor

from .estimator import Aux, ForwardGradient, Losses, Paired, Params, Plain, WithAux
from .kept_by_parameters import KeptByParameters

__all__ = ["forward_gradient"]

_KEPT = KeptByParameters()


class _Options(TypedDict, total=False):
    """Those of a forward gradient."""

    samples: int | None
    estimator: str
    seed: int
    step: int | None
    chunk_size: int | None
    memory: str | int | None
    coupled: str
    allow_unused: bool
    control: bool
    batch_norm: str


@overload
def forward_gradient(
    loss_fn: Losses, params: Params, *batch: Any, has_aux: Plain = False, **options: Unpack[_Options]
) -> Tensor: ...
@overload
def forward_gradient(
    loss_fn: WithAux[Aux], params: Params, *batch: Any, has_aux: Paired, **options: Unpack[_Options]
) -> tuple[Tensor, Aux]: ...
def forward_gradient(
    loss_fn: Callable[..., Any],
    params: Params,
    *batch: Any,
    samples: int | None = None,
    estimator: str = "activation",
    seed: int = 0,
    step: int | None = None,
    chunk_size: int | None = None,
    memory: str | int | None = None,
    coupled: str = "sum",
    allow_unused: bool = False,
    control: bool = True,
    batch_norm: str = "bounded",
    has_aux: bool = False,
) -> Tensor | tuple[Tensor, Any]:
    """Add a forward estimate of the gradient of ``loss_fn(*batch).mean()`` to ``.grad``, and return that mean.

    ``loss_fn`` returns one loss for each sample, (B,), or (B, ...), summed over the rest. ``params`` are tensors, a
    mapping of names to tensors, or a module's ``parameters()`` or ``named_parameters()``. ``step`` numbers the noise;
    by default calls with the same parameters are counted. With ``has_aux`` the function returns (losses, aux), and the
    result is (mean, aux).

    ``estimator`` is "activation", tangents of each layer's output, or "weight", tangents of the weights. ``samples``
    tangents, by default 8 to 32 as :class:`ForwardGradient` has them, are carried ``chunk_size`` at a time, or as many
    as fit into ``memory``. Where the samples of a batch interact, the sum of all losses multiplies a tangent, or
    ``coupled="raise"`` raises. With ``control`` a call also learns from those before it; without it, the result depends
    on (seed, step) alone. ``batch_norm="exact"`` is unbiased through any number of batch norms, and with more than a
    few of them mostly noise.

    Example:
        >>> w = torch.ones(3, requires_grad=True)
        >>> x = torch.eye(3)
        >>> forward_gradient(lambda x: (x @ w - 2).square(), [w], x)
        tensor(1.)
        >>> w.grad  # behind this layer is only the loss, so it is exact
        tensor([-0.6667, -0.6667, -0.6667])
    """
    made = ForwardGradient(
        params,
        samples,
        estimator=estimator,
        seed=seed,
        step=0 if step is None else step,
        chunk_size=chunk_size,
        memory=memory,
        coupled=coupled,
        allow_unused=allow_unused,
        control=control,
        batch_norm=batch_norm,
    )
    return made.remembering(_KEPT, step, loss_fn, batch, has_aux)
