"""Results of operations on what varies that no rows can stand beside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import MissingRule, UnsupportedProgram
from ..storage_geometry import are_kin
from .locate import call_site

__all__ = ["no_complex_rule", "refuse_layout", "refuse_reinterpretation", "refuse_results"]


def no_complex_rule(func: Any) -> MissingRule:
    """The error of an operation on complex numbers whose rule is one for real numbers."""
    return MissingRule(f"{func} has no rule for complex numbers", str(func))


def refuse_reinterpretation(func: Any, dtype: torch.dtype, out: Any) -> None:
    """Raise where a view of memory that varies, of ``dtype``, takes its bits for those of another kind of number."""
    for tensor in out if isinstance(out, list | tuple) else [out]:
        if isinstance(tensor, Tensor) and not are_kin(tensor.dtype, dtype):
            raise MissingRule(f"{func} reinterprets perturbed memory as {tensor.dtype}", str(func))


def refuse_results(func: Any, out: Any) -> None:
    """Raise where a result that varies is no strided tensor."""
    for tensor in out if isinstance(out, list | tuple) else [out]:
        if isinstance(tensor, Tensor) and (tensor.layout is not torch.strided or tensor.is_nested):
            refuse_layout(func, tensor)


def refuse_layout(func: Any, tensor: Tensor) -> None:
    """Raise where a result that varies has no single memory."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").lstrip("_")
        raise UnsupportedProgram(
            f"{call_site(str(func))} makes a {kind} tensor of what depends on parameters; expected a dense one."
        )
