"""Where a minimisation begins, as tensors: numbers and numpy's arrays become some, and results become arrays again.

Nothing here imports numpy: an array can only be given where its package was imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ad import _torch

__all__ = ["StartPoint", "as_tensors"]


class StartPoint:
    """The leaves of x0 as tensors, and the way back.

    ``x0`` is a tensor, an array of numpy's, a number, a list of numbers as scipy takes it, or a tree of tensors and
    arrays. Numbers, and arrays of whole numbers, become float64.

    Example:
        >>> start = StartPoint([1, 2.5])
        >>> start.leaves, start.back(start.leaves)
        ([tensor([1.0000, 2.5000], dtype=torch.float64)], tensor([1.0000, 2.5000], dtype=torch.float64))
        >>> tree = StartPoint({"a": torch.zeros(1), "b": [torch.ones(2)]})
        >>> tree.back([leaf + 1 for leaf in tree.leaves])
        {'a': tensor([1.]), 'b': [tensor([2., 2.])]}
    """

    def __init__(self, x0: Any) -> None:
        whole = _as_tensor(x0) if _numbers(x0) else x0
        given, self._structure = _torch.pytree.tree_flatten(whole)
        converted = [_from_array(leaf) for leaf in given]
        self.leaves: list[Any] = [leaf for leaf, _ in converted]  # tensors, or what no tensor can be made of
        self._back = [back for _, back in converted]

    def tree(self, tensors: list[Tensor]) -> Any:
        """The tensors with the structure of x0, as the function takes them."""
        return _torch.pytree.tree_unflatten(tensors, self._structure)

    def back(self, tensors: list[Tensor]) -> Any:
        """The same, as a result: arrays where arrays were given."""
        leaves = [back(tensor) for back, tensor in zip(self._back, tensors, strict=True)]
        return _torch.pytree.tree_unflatten(leaves, self._structure)


def as_tensors(args: Any) -> tuple[Any, ...]:
    """The further arguments of a function as a tuple, and numpy's arrays of numbers among them as tensors.

    Example:
        >>> as_tensors(2.0), as_tensors((torch.ones(1), "word"))
        ((2.0,), (tensor([1.]), 'word'))
    """
    numpy = sys.modules.get("numpy")
    given = args if isinstance(args, tuple) else (args,)  # as scipy
    if numpy is None:
        return given
    return tuple(_constant(numpy, one) if isinstance(one, numpy.ndarray) else one for one in given)


def _constant(numpy: Any, array: Any) -> Any:
    """An array that does not move: whole numbers and truth values stay what they are."""
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        return array
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def _numbers(x0: object) -> bool:
    """Whether this is a number, or a list of numbers, nested or not: an array as scipy's users write it."""
    if isinstance(x0, list | tuple):
        return len(x0) > 0 and all(map(_numbers, x0))
    return isinstance(x0, int | float) and not isinstance(x0, bool)


def _as_tensor(numbers: Any) -> Tensor:
    try:
        return torch.tensor(numbers, dtype=torch.float64)
    except ValueError as error:
        raise ValueError(f"x0 is a list of numbers of no shape ({error}); expected rows of one length.") from None


def _same(tensor: Tensor) -> Any:
    return tensor


def _from_array(leaf: Any) -> tuple[Any, Callable[[Tensor], Any]]:
    """The leaf as a tensor, if it is an array, and how a result becomes an array again."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(leaf, numpy.ndarray | numpy.generic):
        return leaf, _same
    array = numpy.asarray(leaf)
    if array.dtype.kind in "iu":
        array = array.astype(numpy.float64)
    if array.dtype.kind not in "f" or array.dtype.itemsize > 8:
        raise TypeError(f"x0 has dtype {array.dtype}; expected real numbers of at most 64 bits.")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="))), lambda tensor: tensor.numpy()
