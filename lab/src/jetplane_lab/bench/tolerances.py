"""What a precision means to torch, and how far a result may be from the reference."""

from __future__ import annotations

import torch

__all__ = ["apply", "dtype", "tolerance"]

_DTYPES = {"float32": torch.float32, "tf32": torch.float32, "float64": torch.float64}
_TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "tf32": 2e-2}


def dtype(precision: str) -> torch.dtype:
    """The dtype of all tensors."""
    return _DTYPES[precision]


def apply(precision: str) -> None:
    """Set torch's matrix products and convolutions to the precision.

    Convolutions are set as well: by default cuDNN uses TF32 where matrix products do not.
    """
    fast = precision == "tf32"
    torch.set_float32_matmul_precision("high" if fast else "highest")
    torch.backends.cudnn.allow_tf32 = fast


def tolerance(precision: str, rounding: float = 0.0) -> float:
    """The largest relative error of a right result.

    ``rounding`` is the error of double backward at the same precision: on a badly conditioned problem nobody can do
    much better than that.
    """
    return max(_TOLERANCES[precision], 10 * rounding)
