"""Rows per storage.

A tangent belongs to memory, not to a tensor object: every view of a storage shares one record, so that a write through
any alias is seen by all of them. Rows mirror the storage's geometry; the rows of a view are views of the rows.

Complex numbers are pairs of real ones, in memory and in the rows: a record of either is read and written by views of
the other. Conjugate and negative views (``x.conj()``, ``x.conj().imag``) show what their memory does not hold; rows
belong to the memory, and are turned into what the view shows as they are read, and back as they are written.
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
from ..storage_geometry import Geometry, are_kin, as_pairs, covers, elements, geometry, storage_order
from .locate import call_site


class Source(Protocol):
    """Rows made on demand for a perturbed leaf, so that they need not be held."""

    def tangent(self) -> Tensor: ...  # (K, *S)
    def second(self) -> Tensor | None: ...  # (rows, *S)

    @property
    def structured(self) -> bool: ...  # whether some tangents are zero, or outer products

    def blocks(self) -> list[Block]: ...  # then: the tangents that are not zero


class Record:
    """The rows of one storage, anchored to the geometry of the tensor that they were made for, or to ``anchor``'s.

    With a ``support`` the tangents are those of its directions alone, and there are no second rows.
    """

    def __init__(
        self,
        tensor: Tensor,
        tangent: Tensor | None,
        second: Tensor | None,
        support: Support | None = None,
        anchor: tuple[Geometry, torch.dtype] | None = None,
    ) -> None:
        self._support = None if tangent is None else support
        if anchor is None:
            anchor = geometry(tensor), tensor.dtype
            if tensor.is_conj() or tensor.is_neg():
                tangent, second = _shown(tangent, tensor), _shown(second, tensor)
        self._anchor, self._dtype = anchor
        self._parts: list[Tensor | None] = [tangent, second]
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
        if geometry(tensor) != self._anchor or tensor.dtype != self._dtype:
            self._flatten(tensor)
            tangent, second = (None if rows is None else _read(rows, tensor) for rows in self._parts)
        if tensor.is_conj() or tensor.is_neg():
            tangent, second = _shown(tangent, tensor), _shown(second, tensor)
        return tangent, second

    def write(
        self, tensor: Tensor, tangent: Tensor | None, second: Tensor | None, support: Support | None = None
    ) -> None:
        """Make these the rows of ``tensor``, a view of the recorded storage."""
        if covers(tensor):
            self.__init__(tensor, tangent, second, support)  # type: ignore[misc]
            return
        tangent = self._widen(tangent, support)
        count = self._flatten(tensor)
        for index, rows in enumerate((tangent, second)):
            part = self._parts[index]
            if part is None:
                if rows is None:
                    continue
                part = rows.new_zeros((rows.shape[0], count), dtype=self._dtype)
            elif not self._owned:
                part = part.clone()
            _write(part, tensor, _shown(rows, tensor))
            self._parts[index] = part
        # every part that is not None has just been cloned or made here
        self._owned = True

    def _widen(self, tangent: Tensor | None, support: Support | None) -> Tensor | None:
        """Tangents to write, of all directions; those that are here are made so, too."""
        if self._support is not None and self._parts[0] is not None:
            self._parts[0] = padded(Term(self._support, self._parts[0]), Support.all(self._support.k))
            self._support, self._owned = None, False
        return tangent if tangent is None or support is None else padded(Term(support, tangent), Support.all(support.k))

    def _flatten(self, tensor: Tensor) -> int:
        """Re-anchor the rows to the whole storage, (R, elements); without a copy where the layouts agree."""
        if tensor.dtype != self._dtype:
            _check_kinship(tensor, self._dtype)
        count = elements(tensor, self._dtype)
        flat: Geometry = ((count,), (1,), 0)
        if self._anchor == flat:
            return count
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
        return count


def _check_kinship(tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise where memory is read as numbers of another kind than its rows are derivatives of."""
    if not are_kin(tensor.dtype, dtype):
        raise UnsupportedProgram(
            f"{call_site('the program')} reads the memory of a perturbed tensor of {dtype} as {tensor.dtype}, as "
            "share_memory_() and deepcopy do, where tangents get lost; expected .clone(), or .detach() before it."
        )


def resolved(rows: Tensor | None) -> Tensor | None:
    """Rows that are memory, and no lazy conjugate or negative of it.

    Rules of elementwise operations run below the part of the dispatcher that knows of these.
    """
    return rows if rows is None or not (rows.is_conj() or rows.is_neg()) else rows.resolve_conj().resolve_neg()


def _shown(rows: Tensor | None, tensor: Tensor) -> Tensor | None:
    """Rows of memory as rows of what ``tensor`` shows of it, and back."""
    if rows is not None and tensor.is_conj():
        rows = torch.conj_physical(rows)
    return -rows if rows is not None and tensor.is_neg() else rows


def _read(flat: Tensor, tensor: Tensor) -> Tensor:
    """The rows of a tensor's memory inside rows (R, elements) of its whole storage."""
    if flat.is_complex() == tensor.is_complex():
        return _view(flat, geometry(tensor))
    parts = _halves(flat, tensor)
    return torch.view_as_complex(parts.contiguous()) if tensor.is_complex() else parts


def _write(flat: Tensor, tensor: Tensor, rows: Tensor | None) -> None:
    """Make ``rows``, or zeros, those of a tensor's memory inside rows of its whole storage."""
    if flat.is_complex() == tensor.is_complex():
        target = _view(flat, geometry(tensor))
    else:
        target = _halves(flat, tensor)
        rows = torch.view_as_real(rows) if rows is not None and tensor.is_complex() else rows
    if rows is None:
        target.zero_()
    else:
        target.copy_(rows)


def _halves(flat: Tensor, tensor: Tensor) -> Tensor:
    """Of rows of the other kind: those of real numbers (R, *S), or those of complex ones as pairs (R, *S, 2)."""
    if flat.is_complex():
        return _view(torch.view_as_real(flat).flatten(1), geometry(tensor))
    return _view(flat, as_pairs(geometry(tensor)))


def _view(flat: Tensor, place: Geometry) -> Tensor:
    """The rows of a view at ``place`` inside rows (R, elements) of its whole storage."""
    size, stride, offset = place
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
        if geometry(tensor) == self._shape and tensor.dtype == self._dtype and not tensor.is_conj():
            return self._tangent(), self._source.second()
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
            return Record(tensor, rows, None, support, (self._shape, self._dtype)).operand(tensor)
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
        return Record(tensor, self._tangent(), self._source.second(), anchor=(self._shape, self._dtype))

    def _tangent(self) -> Tensor:
        if self._held is not None:
            return self._held
        rows = self._source.tangent()
        if rows.is_conj() or rows.is_neg():
            rows = rows.resolve_conj().resolve_neg()
        if rows.numel() <= _SMALL:
            self._held = rows
        return rows
