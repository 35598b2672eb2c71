"""The mark of the model's output, an operation of its own: the identity, at which a pass may begin its second order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..algebra.families import jet_rule
from ..algebra.jet import Operand, PairSet

__all__ = ["MARK", "mark_output"]


def mark_output(z: Tensor) -> Tensor:
    """Mark the model's output for a loss that is not one of torch.nn.functional; returns ``z``.

    A Gauss-Newton pass carries no second order before it and all of it behind it. Several tensors may be marked. A
    log_softmax or logsigmoid whose output is marked counts as a part of the loss. Outside of passes: the identity.

    Example:
        >>> import jetplane as jp
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> with jp.perturb(model.parameters(), [torch.eye(2).reshape(2, 1, 2)], curvature="ggn") as jets:
        ...     loss = mark_output(model(x)).square().sum() / 2
        >>> jets.quadratic(loss).curvature
        tensor([[ 9., 12.],
                [12., 16.]])
    """
    if not isinstance(z, Tensor):
        raise TypeError(f"mark_output got {type(z).__name__}; expected a tensor, the model's output.")
    # an operation of its own only where somebody looks: a pass does so by a function mode
    if torch.compiler.is_compiling() or torch.overrides.has_torch_function((z,)):
        marked: Tensor = torch.ops.jetplane.output(z)
        return marked
    return z


@torch.library.custom_op("jetplane::output", mutates_args=())
def _output(z: Tensor) -> Tensor:
    """The model's output."""
    return z.clone()


@_output.register_fake
def _(z: Tensor) -> Tensor:
    return torch.empty_like(z)


_output.register_autograd(lambda ctx, gradient: gradient)
_output.register_vmap(lambda info, in_dims, z: (torch.ops.jetplane.output(z), in_dims[0]))
MARK = torch.ops.jetplane.output.default


@jet_rule(MARK, "linear")
def _mark(pairs: PairSet, op: Any, z: Operand) -> Operand:
    return Operand(z.primal.clone(), z.tangent, z.second)
