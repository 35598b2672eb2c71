"""The one table of forward gradients: what is known of the derivative of each operation, in one record.

A record is looked up by overload, then by overload packet; in-place and out= variants use that of their functional
counterpart. What a record of an elementwise operation leaves out is that of all of them. The table knows no operation:
the records are entered by subject.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...ad.algebra.registry import derived, forget, is_elementwise, name_of
from ..program.done import Done
from ..program.watch import Path, functional
from . import load

__all__ = [
    "INPUTS",
    "RESULT",
    "UNKNOWN",
    "Adjoint",
    "add",
    "both",
    "enter",
    "enter_elementwise",
    "find",
    "is_opaque",
    "lookup",
    "registered",
    "remove",
]

Pull = Callable[[Any, Done, Path], Tensor]  # the derivative at the result, the operation, which argument
Alive = Callable[[Tensor | None, Done, Path], Tensor | None]
# of the wanted entries of the result, its shape, that of the argument, which one it is, and the settings: those of it
Live = Callable[[Tensor, torch.Size, torch.Size, Path, Sequence[Any]], Tensor | None]

INPUTS, RESULT = "inputs", "result"


def _everywhere(alive: Tensor | None, done: Done, path: Path) -> Tensor | None:
    return None


@dataclass(frozen=True)
class Adjoint:
    """What is known of an operation. Each part may be left out."""

    pull: Pull | None = None  # the vector-Jacobian product, to an argument that varies
    product: Pull | None = None  # the same to a parameter, with the layer's own input; None: as ``pull``
    alive: Alive = _everywhere  # a mask of where the argument may have a derivative to that of the result; None: all
    live: Live | None = None  # which entries of the argument the wanted ones of the result depend on; None: all
    reads: tuple[str, ...] = (INPUTS,)  # the tensors that the derivative is made of: else only shapes
    paths: tuple[Path, ...] | None = ((0,),)  # the arguments that ``pull`` holds for; None: any
    tail: bool = False  # pulled back through only behind the last layer, where the loss is
    weights: bool = False  # a product with a layer's weight: pulled back through for what scales its input, only
    apart: bool = False  # not pulled back through where an argument is a parameter: that is a layer
    parts: bool = False  # has several results; the derivative at it is a list, with None for those that nothing reads
    picks: bool = False  # reads a part of its argument, though all of the result is wanted
    neutral: bool = False  # moves or copies entries, each of them once
    scales: bool = False  # its parameters scale and shift, entry by entry: those of a norm, or of arithmetic
    norms_last: bool = False  # a norm over the axes that its second argument has the sizes of
    norms_batch: bool = False  # a norm that may be over the batch
    opaque: Callable[[Any, Any, Any], bool] | None = None  # of a call: whether ``pull`` does not hold after all

    @property
    def known(self) -> bool:
        """Whether one can pull back through the operation at all."""
        return self.pull is not None

    def holds(self, path: Path | None) -> bool:
        """Whether there is a ``pull`` to the argument at ``path``."""
        return path is not None and self.known and (self.paths is None or path in self.paths)

    def product_to(self, path: Path) -> Pull | None:
        """How the gradient of a parameter at ``path`` is made; None where that is not known."""
        if self.product is not None or self.parts or not self.holds(path):
            return self.product
        return self.pull


UNKNOWN = Adjoint(reads=())  # of an operation without a record
_TABLE: dict[Any, Adjoint] = {}
_ELEMENTWISE: list[Adjoint] = []


def add(op: Any, record: Adjoint) -> None:
    """Enter a record for an overload or an overload packet."""
    if op in _TABLE:
        raise ValueError(f"{name_of(op)} already has an adjoint; expected one for each.")
    _TABLE[op] = record
    forget()


def enter(record: Adjoint, *ops: Any) -> None:
    """Enter one record for several operations."""
    for op in ops:
        add(op, record)


def enter_elementwise(record: Adjoint) -> None:
    """What holds for all operations of that family."""
    _ELEMENTWISE.append(record)
    forget()


def remove(op: Any) -> None:
    """Take the record of ``op`` out of the table."""
    if op not in _TABLE:
        raise ValueError(f"{name_of(op)} has no adjoint to remove.")
    del _TABLE[op]
    forget()


def registered() -> dict[Any, Adjoint]:
    """A copy of the table."""
    load()
    return dict(_TABLE)


@derived
def lookup(func: Any) -> Adjoint:
    """What is known of an operation, or of the one that it performs in place."""
    load()
    op = functional(func)
    found = _TABLE.get(op) or _TABLE.get(op.overloadpacket)
    if not is_elementwise(op):
        return found or UNKNOWN
    (common,) = _ELEMENTWISE
    return _completed(found, common) if found else common


@cache
def _completed(record: Adjoint, common: Adjoint) -> Adjoint:
    scales = record.scales or record.product is None
    return replace(record, product=record.product or common.product, live=record.live or common.live, scales=scales)


@derived
def find(func: Any, path: Path | None) -> Adjoint:
    """The record by which to pull back through ``func`` to its argument at ``path``, if there is one for that."""
    found = lookup(func)
    return found if found.holds(path) else UNKNOWN


def is_opaque(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation cannot be pulled back through after all, called like this."""
    opaque = lookup(func).opaque
    return opaque is not None and opaque(func, args, kwargs)


def both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Where both are alive."""
    return b if a is None else a if b is None else a & b
