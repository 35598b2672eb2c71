"""The plane of a program beside backprop and double backward."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import jetplane as jp

from .program import Built, loss_of

__all__ = ["Compared", "compare", "not_run"]

K = 2
_TWICE = "double backward"
_EXACT, _DIFFERENCE = 1e-6, 1e-3  # largest relative error, beside double backward and beside finite differences
_STEPS = (1e-3, 1e-5, 1e-6, 1e-7)  # of finite differences: a kink between the points spoils the wide ones


class Compared(NamedTuple):
    """How a program came out: exact, refused, wrong, or not built."""

    result: str
    words: str = ""
    slope_error: float = 0.0
    curvature_error: float = 0.0
    oracle: str = ""
    parameters: int = 0


class _Widened(TorchFunctionMode):
    """A program's own casts to lower precision go to double: what is compared are derivatives, not rounding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        if func is not torch.set_default_dtype:
            args = tuple(_wide(arg) for arg in args)
            kwargs = {name: _wide(arg) for name, arg in kwargs.items()}
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})


def not_run(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def compare(build: Callable[[], Built]) -> Compared:
    """Build a program and compare its plane."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        with _Widened():
            built = build()
            leaves = _prepared(built)
            loss, gradient, plain = _run(built), None, None
            count = sum(leaf.numel() for leaf in leaves)
            if not torch.isfinite(loss):
                raise ValueError(f"its loss is {loss.item()}")
            gradient = torch.autograd.grad(loss, leaves, allow_unused=True)
            plain = _run(built)
        if not torch.allclose(plain, loss, rtol=1e-12, atol=1e-12):
            raise ValueError(
                f"its loss is {loss.item()} and then {plain.item()}: it is not a function of its parameters"
            )
    except Exception as error:
        return Compared("not built", not_run(error))
    used = [(leaf, grad) for leaf, grad in zip(leaves, gradient, strict=True) if grad is not None]
    leaves, gradient = [leaf for leaf, _ in used], [grad for _, grad in used]
    if not leaves:
        return Compared("not built", "no parameter has a gradient")
    return _compare(built, leaves, gradient, count)


def _prepared(built: Built) -> list[Tensor]:
    built.model.double()
    leaves = [leaf for leaf in built.model.parameters() if leaf.is_floating_point()]
    with torch.no_grad():
        for leaf in leaves:  # away from zero, which many layers begin with
            leaf.add_(0.02 * torch.randn_like(leaf))
            leaf.requires_grad_()
    return leaves


def _run(built: Built) -> Tensor:
    torch.manual_seed(1)  # dropout, and what else draws
    np.random.seed(1)
    random.seed(1)
    return loss_of(built.call())


def _compare(built: Built, leaves: Sequence[Tensor], gradient: Sequence[Tensor], count: int) -> Compared:
    torch.manual_seed(2)
    scale = 1 / count**0.5
    directions = [scale * torch.randn(K, *leaf.shape) for leaf in leaves]
    try:
        with _Widened(), jp.perturb(leaves, directions, allow_unused=True) as jets:
            loss = _run(built)
            plane = jets.quadratic(loss)
    except jp.JetplaneError as error:
        return Compared("refused", not_run(error), parameters=count)
    except Exception as error:
        return Compared("failed", not_run(error), parameters=count)
    slope = _of_values(built, leaves, directions) if built.approximate else _along(gradient, directions)
    slope_error = _error(plane.slope, slope)
    curvature_error, oracle, right = _beside(plane.curvature, built, leaves, directions)
    if slope_error <= _EXACT and curvature_error <= (_EXACT if oracle == _TWICE else _DIFFERENCE):
        return Compared("exact", "", slope_error, curvature_error, oracle, count)
    words = f"{_numbers(plane.slope, plane.curvature)} beside {_numbers(slope, right)}"
    return Compared("wrong", words, slope_error, curvature_error, oracle, count)


def _numbers(slope: Tensor, curvature: Tensor) -> str:
    return f"slope {slope.tolist()}, curvature {curvature.tolist()}"


def _along(parts: Sequence[Tensor], directions: Sequence[Tensor]) -> Tensor:
    return sum(
        torch.einsum("ki,i->k", d.reshape(K, -1), part.flatten()) for part, d in zip(parts, directions, strict=True)
    )


def _error(found: Tensor, right: Tensor) -> float:
    """The largest difference over the largest entry; what is below 1e-10 counts as zero."""
    return ((found - right).abs().max() / right.abs().max().clamp_min(1e-10)).item() if right.isfinite().all() else 1e9


def _beside(
    curvature: Tensor, built: Built, leaves: Sequence[Tensor], directions: Sequence[Tensor]
) -> tuple[float, str, Tensor]:
    """The error of a curvature, by what it was found, and what is right.

    By double backward; where there is none, or it says otherwise, by finite differences of the gradient, for torch's
    own second derivatives can be wrong (of hardswish, and of weight norm along an inner axis).
    """
    with contextlib.suppress(Exception):  # an operation without a second derivative
        right = _twice(built, leaves, directions)
        error = _error(curvature, right)
        if error <= _EXACT:
            return error, _TWICE, right
    several = [torch.stack([_difference(built, leaves, directions, i, h) for i in range(K)]) for h in _STEPS]
    best = min(several, key=lambda one: _error(curvature, one))
    return _error(curvature, best), "finite differences", best


def _twice(built: Built, leaves: Sequence[Tensor], directions: Sequence[Tensor]) -> Tensor:
    with _Widened(), sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        gradient = torch.autograd.grad(_run(built), leaves, create_graph=True, allow_unused=True)
        parts = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradient, strict=True)]
        rows = []
        for slope in _along(parts, directions):
            row = torch.autograd.grad(slope, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
            rows.append(_along(row, directions))
        return torch.stack(rows)


def _of_values(built: Built, leaves: Sequence[Tensor], directions: Sequence[Tensor]) -> Tensor:
    """The slope by values at two points beside, for each direction."""
    h = 1e-5
    with torch.no_grad():
        ends = [[_moved(built, leaves, directions, i, step, _run) for step in (h, -h)] for i in range(K)]
    return torch.stack([(above - below) / (2 * h) for above, below in ends])


def _difference(built: Built, leaves: Sequence[Tensor], directions: Sequence[Tensor], index: int, h: float) -> Tensor:
    """Row ``index`` of the curvature, from gradients at four points beside, to fourth order in their distance."""

    def gradient(built: Built) -> Tensor:
        parts = torch.autograd.grad(_run(built), leaves, allow_unused=True, materialize_grads=True)
        return _along(parts, directions)

    def at(step: float) -> Tensor:
        return _moved(built, leaves, directions, index, step, gradient)

    return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)


def _moved(
    built: Built,
    leaves: Sequence[Tensor],
    directions: Sequence[Tensor],
    index: int,
    step: float,
    found: Callable[[Built], Tensor],
) -> Tensor:
    """What is found a step along a direction from here."""
    kept = [leaf.detach().clone() for leaf in leaves]
    try:
        with torch.no_grad():
            for leaf, direction in zip(leaves, directions, strict=True):
                leaf.add_(step * direction[index])
        with _Widened():
            return found(built)
    finally:
        with torch.no_grad():
            for leaf, value in zip(leaves, kept, strict=True):
                leaf.copy_(value)
