"""Whether a compiled function gives the numbers of the uncompiled one. A compiler may be wrong, too.

The two may differ by rounding, and by what rounding does to the program: two entries that max-pooling takes the larger
one of may be equal up to rounding, and a badly conditioned system makes its error larger. So there are two tests. One
is tight, and follows the coarsest arithmetic that the program uses. What does not pass it is compared with what the
uncompiled function itself does when its inputs change in their last digit: a difference of that size is not the
compiler's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import CaptureFailed
from . import _torch

__all__ = ["compare"]

# Of an output's largest entry, where an operation rounds by up to ``eps`` of torch.finfo. A sum of a million terms
# in another order, and the cancellation in second derivatives, cost three digits or so.
_FLOAT64, _FLOAT32, _REDUCED = 1e-10, 1e-4, 0.05
_TF32 = 2.0**-10  # rounding of its products
_CHANGES = 16  # of the inputs at most: an exact tie falls the other way in a quarter of them
_MARGIN = 10.0  # times the largest change of the output: a few draws do not find the worst one


def compare(
    function: Callable[[list[Tensor]], Sequence[Tensor]],
    run: Callable[[list[Tensor]], Sequence[Tensor]],
    inputs: Sequence[Tensor],
    full: bool = False,
) -> None:
    """Raise CaptureFailed where ``run`` gives other numbers than ``function`` does, beyond what rounding explains.

    ``full``: float32 products have all their bits while the two are compared, so that the tight test is the one.
    """
    if full:
        with _torch.full_precision():
            return compare(function, run, inputs)
    watch = _Arithmetic()
    with torch.no_grad(), watch:
        expected = function(_copies(inputs))
    actual = run(_copies(inputs))
    tolerance, rounding = watch.tolerance()
    errors = {number: difference(*pair) for number, pair in enumerate(zip(expected, actual, strict=True))}
    unexplained = {number: error for number, error in errors.items() if not error <= tolerance}
    changes = 0 if tolerance == _REDUCED or float("inf") in errors.values() else _CHANGES
    for seed in range(changes):
        if not unexplained:
            return
        changed = _changed(function, inputs, rounding, seed)
        spread = {number: difference(expected[number], changed[number]) for number in unexplained}
        unexplained = {number: error for number, error in unexplained.items() if error > _MARGIN * spread[number]}
    for number, error in unexplained.items():
        raise CaptureFailed(f"compiled, its output {number} differs by {error:.1e} from what it is uncompiled")


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest entry; numbers that are not finite must agree."""
    one, other = one.double(), other.double()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    size = one.nan_to_num(0.0, 0.0, 0.0).abs().max() if one.numel() else one.new_zeros(())
    gap = (one - other).nan_to_num(0.0, 0.0, 0.0).abs().max() if one.numel() else one.new_zeros(())
    return float(gap / size) if size > 0 else float(gap)


def _copies(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in inputs]


def _changed(
    function: Callable[[list[Tensor]], Sequence[Tensor]], inputs: Sequence[Tensor], rounding: float, seed: int
) -> Sequence[Tensor]:
    """The outputs where half of the numbers in the inputs are smaller by one rounding.

    Not larger: a probability stays one. Zeros stay what they are.
    """
    generator = torch.Generator().manual_seed(seed)
    changed = []
    for tensor in _copies(inputs):
        if tensor.is_floating_point():
            chosen = torch.randint(2, tensor.shape, generator=generator, device="cpu").to(tensor.device, torch.float64)
            relative = max(rounding, torch.finfo(tensor.dtype).eps)
            tensor = (tensor.double() * (1 - relative * chosen)).to(tensor.dtype)
        changed.append(tensor)
    with torch.no_grad():
        return function(changed)


class _Arithmetic(_torch.DispatchMode):
    """Notes the coarsest arithmetic that runs inside: casts in the program and autocast are seen as well."""

    def __init__(self) -> None:
        super().__init__()
        self._coarsest = 0.0
        self._float32_on_cuda = self._convolved = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in _torch.pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._coarsest = max(self._coarsest, torch.finfo(tensor.dtype).eps)
                self._float32_on_cuda |= tensor.dtype is torch.float32 and tensor.is_cuda
        self._convolved |= "convolution" in func.overloadpacket.__name__
        return out

    def tolerance(self) -> tuple[float, float]:
        """How far outputs may differ, and the relative error of one operation."""
        if self._float32_on_cuda and _uses_tf32(self._convolved):
            self._coarsest = max(self._coarsest, _TF32)
        if self._coarsest <= torch.finfo(torch.float64).eps:
            return _FLOAT64, self._coarsest
        return (_FLOAT32 if self._coarsest <= torch.finfo(torch.float32).eps else _REDUCED), self._coarsest


def _uses_tf32(convolved: bool) -> bool:
    try:
        products = torch.get_float32_matmul_precision() != "highest"
        return products or (convolved and torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # torch does not say where its newer settings are in use
        return True
