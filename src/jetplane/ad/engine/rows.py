"""Rows per storage.

A tangent belongs to memory, not to a tensor object: every view of a storage shares one record, so that a write through
any alias is seen by all of them. Rows mirror the storage's geometry; the rows of a view are views of the rows.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from ...errors import UnsupportedProgram
from .. import _torch
from ..algebra.jet import Operand
from ..algebra.sparse import Block, Factors, SparseOperand, Support, Term, gathered, padded
from ..storage_geometry import Geometry, covers, elements, geometry, storage_order
from .locate import call_site
from .results import complex_value


class Source(Protocol):
    """Rows made on demand for a perturbed leaf, so that they need not be held."""

    def tangent(self) -> Tensor: ...  # (K, *S)
    def second(self) -> Tensor | None: ...  # (rows, *S)

    @property
    def structured(self) -> bool: ...  # whether some tangents are zero, or outer products

    def blocks(self) -> list[Block]: ...  # then: the tangents that are not zero


class Record:
    """The rows of one storage, anchored to the geometry of the tensor that they were made for.

    With a ``support`` the tangents are those of its directions alone, and there are no second rows.
    """

    def __init__(
        self,
        tensor: Tensor,
        tangent: Tensor | None,
        second: Tensor | None,
        support: Support | None = None,
        anchor: Geometry | None = None,
    ) -> None:
        self._support = None if tangent is None else support
        self._anchor = geometry(tensor) if anchor is None else anchor
        self._parts: list[Tensor | None] = [tangent, second]
        self._dtype = tensor.dtype
        # Rows that were read may be shared (y = x + 1 has x's tangents), so the next write copies them.
        self._owned = False

    @property
    def empty(self) -> bool:
        """Whether all rows are zero."""
        return self._parts[0] is None and self._parts[1] is None

    def read(self, tensor: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Tangent and second rows of ``tensor``, a view of the recorded storage."""
        tangent, second = self._read(tensor)
        if self._support is not None and tangent is not None:
            tangent = padded(Term(self._support, tangent), Support.all(self._support.k))
        return tangent, second

    def operand(self, tensor: Tensor) -> Operand:
        """The same with the rows of some directions alone, where there are no others."""
        tangent, second = self._read(tensor)
        if self._support is not None and tangent is not None:
            return SparseOperand(tensor, tangent, None, self._support)
        return Operand(tensor, tangent, second)

    def _read(self, tensor: Tensor) -> tuple[Tensor | None, Tensor | None]:
        self._owned = False
        tangent, second = self._parts
        if geometry(tensor) == self._anchor:
            return tangent, second
        if tensor.dtype != self._dtype:
            _refuse_bytes(tensor, self._dtype)
        self._flatten(tensor)
        tangent, second = self._parts
        return None if tangent is None else _view(tangent, tensor), None if second is None else _view(second, tensor)

    def write(
        self, tensor: Tensor, tangent: Tensor | None, second: Tensor | None, support: Support | None = None
    ) -> None:
        """Make these the rows of ``tensor``, a view of the recorded storage."""
        if covers(tensor):
            self.__init__(tensor, tangent, second, support)  # type: ignore[misc]
            return
        tangent = self._widen(tangent, support)
        self._flatten(tensor)
        for index, rows in enumerate((tangent, second)):
            part = self._parts[index]
            if part is None:
                if rows is None:
                    continue
                part = rows.new_zeros((rows.shape[0], elements(tensor)), dtype=self._dtype)
            elif not self._owned:
                part = part.clone()
            target = _view(part, tensor)
            if rows is None:
                target.zero_()
            else:
                target.copy_(rows)
            self._parts[index] = part
        # every part that is not None has just been cloned or made here
        self._owned = True

    def _widen(self, tangent: Tensor | None, support: Support | None) -> Tensor | None:
        """Tangents to write, of all directions; those that are here are made so, too."""
        if self._support is not None and self._parts[0] is not None:
            self._parts[0] = padded(Term(self._support, self._parts[0]), Support.all(self._support.k))
            self._support, self._owned = None, False
        return tangent if tangent is None or support is None else padded(Term(support, tangent), Support.all(support.k))

    def _flatten(self, tensor: Tensor) -> None:
        """Re-anchor the rows to the whole storage, (R, elements); without a copy where the layouts agree."""
        count = elements(tensor)
        flat: Geometry = ((count,), (1,), 0)
        if self._anchor == flat:
            return
        size, stride, offset = self._anchor
        order = storage_order(size, stride) if offset == 0 and math.prod(size) == count else None
        for index, part in enumerate(self._parts):
            if part is None:
                continue
            if order is not None:  # a copy only where the rows are laid out in another way
                rows = part.permute(0, *(axis + 1 for axis in order)).reshape(part.shape[0], count)
            else:
                rows = part.new_zeros((part.shape[0], count))
                rows.as_strided((part.shape[0], *size), (count, *stride), offset).copy_(part)
            self._parts[index] = rows
        self._anchor = flat


def _refuse_bytes(tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise where memory is read as numbers of another kind than its rows are derivatives of."""
    if tensor.is_complex() or dtype.is_complex:
        raise complex_value("an operation")
    raise UnsupportedProgram(
        f"{call_site('the program')} reads the memory of a perturbed tensor of {dtype} as {tensor.dtype}, as "
        "share_memory_() and deepcopy do, where tangents get lost; expected .clone(), or .detach() before it."
    )


def _view(flat: Tensor, tensor: Tensor) -> Tensor:
    """The rows of ``tensor`` inside rows (R, elements) of its whole storage."""
    size, stride, offset = geometry(tensor)
    if type(flat) is not Tensor and _torch.is_fake(type(flat)) and offset == 0 and math.prod(size) == flat.shape[1]:
        order = storage_order(size, stride)
        if order is not None:  # a compiler sees through these views, and not through as_strided
            back = sorted(range(len(order)), key=order.__getitem__)
            return flat.reshape(flat.shape[0], *(size[axis] for axis in order)).permute(0, *(axis + 1 for axis in back))
    row, unit = flat.stride()  # the unit is 0 for expanded rows
    steps = stride if unit == 1 else [unit * s for s in stride]
    return flat.as_strided((flat.shape[0], *size), (row, *steps), flat.storage_offset() + offset * unit)


_SMALL = 1 << 16  # numbers; making them anew at each use would cost more than holding them


class Seed:
    """The record of a perturbed leaf: rows come from a source at each use, and only small ones are held."""

    def __init__(self, tensor: Tensor, source: Source, label: str) -> None:
        self._source = source
        self._held: Tensor | None = None
        self._blocks: list[Block] | None = None
        self._views: Record | None = None
        self._shape = geometry(tensor)
        self._dtype = tensor.dtype
        self.label = label
        self.used = False

    def read(self, tensor: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Tangent and second rows of ``tensor``, a view of the leaf."""
        if geometry(tensor) == self._shape:
            return self._tangent(), self._source.second()
        if tensor.dtype != self._dtype:
            _refuse_bytes(tensor, self._dtype)
        if self._views is None:
            record = self.record(tensor)
            if self._held is None:
                return record.read(tensor)
            self._views = record  # of rows that are held; writes make a record of their own
        return self._views.read(tensor)

    @property
    def structured(self) -> bool:
        """Whether some of the leaf's tangents are zero, or outer products."""
        return self._source.structured

    def operand(self, tensor: Tensor, k: int) -> Operand:
        """The leaf's tangents, or those of a view of it, without zeros and with outer products as they are."""
        if not self.structured:
            return Operand(tensor, *self.read(tensor))
        blocks, turned = self._nonzero(tensor), self._is_transpose(tensor)
        dense = [block for block in blocks if not isinstance(block.rows, Factors)]
        outer = [block for block in blocks if isinstance(block.rows, Factors)]
        if geometry(tensor) != self._shape and not turned:
            dense, outer = [Block(block.start, block.dense()) for block in blocks], []
        terms = [Term(Support.of(k, [(block.start, block.stop)]), block.dense()) for block in dense]
        term = gathered(terms)
        support, rows = (Support(k, ()), None) if term is None else term
        if turned:
            outer = [Block(start, Factors(rows.right, rows.left)) for start, rows in outer]  # type: ignore[union-attr]
            rows = None if rows is None else rows.mT
        elif rows is not None and geometry(tensor) != self._shape:
            return Record(tensor.as_strided(*self._shape), rows, None, support).operand(tensor)
        return SparseOperand(tensor, rows, None, support, tuple(outer))

    def _nonzero(self, tensor: Tensor) -> list[Block]:
        if self._blocks is not None:
            return self._blocks
        blocks = self._source.blocks()
        if not blocks:  # a row of zeros, so that what is made of the leaf is known to depend on it
            blocks = [Block(0, tensor.new_zeros((1, *self._shape[0])))]
        parts = [part for block in blocks for part in (block.rows if isinstance(block.rows, Factors) else [block.rows])]
        if sum(part.numel() for part in parts) <= _SMALL:
            self._blocks = blocks
        return blocks

    def _is_transpose(self, tensor: Tensor) -> bool:
        """Whether the tensor is the leaf, a matrix, transposed."""
        return len(self._shape[0]) == tensor.ndim == 2 and geometry(tensor.mT) == self._shape != geometry(tensor)

    def record(self, tensor: Tensor) -> Record:
        """The leaf's rows as an ordinary record, for views and writes."""
        return Record(tensor, self._tangent(), self._source.second(), anchor=self._shape)

    def _tangent(self) -> Tensor:
        if self._held is not None:
            return self._held
        rows = self._source.tangent()
        if rows.numel() <= _SMALL:
            self._held = rows
        return rows
