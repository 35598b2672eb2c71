"""Results of operations on what varies that no rows can stand beside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import MissingRule, UnsupportedProgram
from .locate import call_site

__all__ = ["complex_value", "refuse_layout", "refuse_reinterpretation", "refuse_results"]


def complex_value(func: Any) -> UnsupportedProgram:
    """The error of an operation that makes a complex number."""
    return UnsupportedProgram(
        f"complex is not supported: {call_site(str(func))} makes a complex value of a perturbed tensor; expected "
        "real ones."
    )


def refuse_reinterpretation(func: Any, dtype: torch.dtype, out: Any) -> None:
    """Raise where a view of memory that varies, of ``dtype``, takes its bits for another one."""
    for tensor in out if isinstance(out, list | tuple) else [out]:
        if isinstance(tensor, Tensor) and tensor.dtype != dtype:
            if tensor.is_complex() or dtype.is_complex:
                raise complex_value(func)
            raise MissingRule(f"{func} reinterprets perturbed memory as {tensor.dtype}", str(func))


def refuse_results(func: Any, out: Any) -> None:
    """Raise where a result that varies is complex, or no strided tensor."""
    for tensor in out if isinstance(out, list | tuple) else [out]:
        if not isinstance(tensor, Tensor):
            continue
        if tensor.is_complex():
            raise complex_value(func)
        if tensor.layout is not torch.strided or tensor.is_nested:
            refuse_layout(func, tensor)


def refuse_layout(func: Any, tensor: Tensor) -> None:
    """Raise where a result that varies has no single memory."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").lstrip("_")
        raise UnsupportedProgram(
            f"{call_site(str(func))} makes a {kind} tensor of what depends on parameters; expected a dense one."
        )
