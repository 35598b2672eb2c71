"""Rules of matrix products and convolutions, lifted over rows by hand: they are where the time goes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from ..algebra.families import (
    accumulate,
    align,
    bilinear,
    composite,
    jet_rule,
    joint_product,
    primal_of,
    primals_of,
    product,
    scaled,
    spread,
    with_term,
)
from ..algebra.jet import Operand, PairSet
from ..algebra.sparse import Factors, SparseOperand, Term, added, gathered, term_of
from ..kernels import convolution_kernel

aten = torch.ops.aten


_NARROW = 64  # columns up to which one product for all rows takes less time than one for each, or as much


@dataclass(frozen=True)
class MatMul:
    """Matrix product over rows: (R, m, k) x (k, n) and so on, with any number of batch axes before m."""

    def left(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.matmul(a, b)

    def right(self, a: Tensor, b: Tensor) -> Tensor:
        if a.layout is not torch.strided:  # it has no axis to add to, nor a product with several matrices
            rows, inner, n = b.shape
            return (a @ b.permute(1, 0, 2).reshape(inner, rows * n)).reshape(-1, rows, n).permute(1, 0, 2)
        if a.ndim == 2 and b.shape[2] <= _NARROW:
            return self.grid(a.unsqueeze(0), b)[0]
        return torch.matmul(a, b)

    def paired(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.matmul(a, b)

    def grid(self, a: Tensor, b: Tensor) -> Tensor:
        if a.ndim == 3:
            # one product with the rows of b side by side: (K m, k) x (k, L n)
            (k, m, inner), (rows, _, n) = a.shape, b.shape
            wide = b.permute(1, 0, 2).reshape(inner, rows * n)
            return (a.reshape(k * m, inner) @ wide).reshape(k, m, rows, n).permute(0, 2, 1, 3)
        return torch.matmul(a[:, None], b[None])

    def joint(self, a: Tensor, b: Tensor) -> Tensor:
        return self.grid(a, b)

    def outer(self, a: Tensor, b: Factors, out: Tensor | None = None) -> Tensor:
        """Products of a (*batch, m, k) with matrices u_r v_r^T (k, n)."""
        inner = torch.matmul(a, b.left.T)  # (*batch, m, R)
        wide = b.right.reshape(len(b.right), *(1,) * (a.ndim - 1), -1)
        return torch.mul(inner.movedim(-1, 0).unsqueeze(-1), wide, out=out)


def _matmul(op: Any, a: Tensor, b: Tensor) -> MatMul:
    return MatMul()


bilinear(aten.mm.default, _matmul)
composite(aten._sparse_addmm.default, lambda bias, a, b, *, beta=1, alpha=1: beta * bias + alpha * torch.mm(a, b))
bilinear(aten.bmm.default, _matmul)
bilinear(aten.mv.default)
bilinear(aten.dot.default)
bilinear(aten._grouped_mm.default)
bilinear(aten.vdot.default)
bilinear(aten.linalg_cross.default)


def _affine(bias: Any, beta: Any, inner: Operand, alpha: Any) -> Operand:
    """The jet of beta * bias + alpha * inner, whose rows are the caller's own."""

    def part(rows: Tensor | None, more: Tensor | None) -> Tensor | None:
        rows = scaled(rows, alpha)
        more = scaled(align(more, inner.primal.ndim), beta)
        if rows is None:
            return spread(more, inner.primal)
        return accumulate(rows, more)

    if isinstance(inner, SparseOperand) or isinstance(bias, SparseOperand):
        return _sparse_affine(bias, beta, inner, alpha)
    if not isinstance(bias, Operand):
        return Operand(inner.primal, scaled(inner.tangent, alpha), scaled(inner.second, alpha))
    return Operand(inner.primal, part(inner.tangent, bias.tangent), part(inner.second, bias.second))


def _sparse_affine(bias: Any, beta: Any, inner: Operand, alpha: Any) -> Operand:
    """The same of first order, for the directions that one of them has."""
    terms = []
    for operand, factor in ((inner, alpha), (bias, beta)):
        term = term_of(operand) if isinstance(operand, Operand) else None
        rows = None if term is None else spread(scaled(align(term.rows, inner.primal.ndim), factor), inner.primal)
        if term is not None and rows is not None:
            terms.append(Term(term.support, rows))
    # two terms: the first one's rows are the product's, which belong to nobody else
    return with_term(inner.primal, added(*terms) if len(terms) == 2 else gathered(terms))


@jet_rule(aten.addmm.default, "bilinear")
@jet_rule(aten.baddbmm.default, "bilinear")
def _addmm(pairs: PairSet, op: Any, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Operand:
    sparse = isinstance(a, SparseOperand) or isinstance(b, SparseOperand)
    if op is aten.addmm.default and isinstance(b, Operand) and _torch.is_fake(type(b.primal)) and not sparse:
        jet = joint_product(pairs, MatMul(), a, b)
        value = jet.primal if alpha == 1 else jet.primal * alpha
        value = value + (primal_of(bias) if beta == 1 else primal_of(bias) * beta)
        return _affine(bias, beta, Operand(value, jet.tangent, jet.second), alpha)
    y = op(*primals_of((bias, a, b)), beta=beta, alpha=alpha)
    return _affine(bias, beta, product(pairs, y, MatMul(), a, b), alpha)


composite(aten.addmv, lambda bias, a, x, *, beta=1, alpha=1: beta * bias + alpha * torch.mv(a, x))
composite(aten.addbmm, lambda bias, a, b, *, beta=1, alpha=1: beta * bias + alpha * torch.bmm(a, b).sum(0))
composite(aten.addr, lambda bias, a, b, *, beta=1, alpha=1: beta * bias + alpha * (a[:, None] * b[None, :]))
composite(aten.ger, lambda a, b: a[:, None] * b[None, :])


def _addmm_activation(
    bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False
) -> Tensor:
    y = torch.addmm(bias, a, b, beta=beta, alpha=alpha)
    if not use_gelu:
        return y.relu()
    return torch.nn.functional.gelu(y, approximate="tanh" if y.is_cuda else "none")  # as torch's kernels have it


composite(aten._addmm_activation, _addmm_activation)
composite(aten.linear, lambda x, w, b=None: torch.matmul(x, w.mT) if b is None else torch.matmul(x, w.mT) + b)


def _trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand1: list[int],
    expand2: list[int],
    expand3: list[int],
    sumdim: list[int],
    unroll_dim: int = 1,
) -> Tensor:
    for axis in sorted(expand1):
        a = a.unsqueeze(axis)
    for axis in sorted(expand2):
        b = b.unsqueeze(axis)
    for axis in sorted(expand3):
        c = c.unsqueeze(axis)
    out = a * b * c
    return out.sum(sumdim) if sumdim else out


composite(aten._trilinear, _trilinear)

# -- convolution --------------------------------------------------------------------------------------------------


_FEW = 32  # numbers that an output depends on


@dataclass(frozen=True)
class Convolution:
    """A convolution without bias over rows: input rows join the batch, weight rows the output channels."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    def __call__(self, x: Tensor, w: Tensor, groups: int = 1) -> Tensor:
        return torch.convolution(
            x,
            w,
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups * groups,
        )

    def left(self, x: Tensor, w: Tensor) -> Tensor:
        y = self(x.flatten(0, 1), w)
        return y.unflatten(0, x.shape[:2])

    def right(self, x: Tensor, w: Tensor) -> Tensor:
        return self._channels_to_rows(self(x, self._wide(w)), w.shape[0]).movedim(2, 0).flatten(2, 3)

    def grid(self, x: Tensor, w: Tensor) -> Tensor:
        y = self(x.flatten(0, 1), self._wide(w)).unflatten(0, x.shape[:2])
        y = self._channels_to_rows(y, w.shape[0])  # (K, B, g, L, O/g, ...)
        return y.movedim(3, 1).flatten(3, 4)

    def joint(self, x: Tensor, w: Tensor) -> Tensor:
        """All x (K, B, ...) with all w (L, O, ...) in one call, laid out as the device likes it: (K, L, B, O, ...)."""
        y = self._laid_out(x.flatten(0, 1), self._wide(w)).unflatten(0, x.shape[:2])
        return self._channels_to_rows(y, w.shape[0]).movedim(3, 1).flatten(3, 4)

    def _laid_out(self, x: Tensor, w: Tensor) -> Tensor:
        if x.device.type != "cuda" or len(self.stride) != 2 or self.transposed:
            return self(x, w)
        if self.groups == 1 and w[0].numel() <= _FEW and not any(self.padding) and set(self.dilation) == {1}:
            return self._as_matrices(x, w)
        # tensor cores read channels last; the copies are a part of what made x
        last = torch.channels_last
        return self(x.contiguous(memory_format=last), w.contiguous(memory_format=last))

    def _as_matrices(self, x: Tensor, w: Tensor) -> Tensor:
        """A convolution with so few inputs to each output that no library uses tensor cores for it, as one product."""
        (down, across), (height, width) = self.stride, w.shape[2:]
        patches = x.unfold(2, height, down).unfold(3, width, across)  # (N, C, oh, ow, height, width)
        n, _, oh, ow = patches.shape[:4]
        flat = patches.permute(0, 2, 3, 1, 4, 5).reshape(n * oh * ow, -1)
        kernels = w.flatten(1)
        spare = -flat.shape[1] % 4  # rows that begin at 16 bytes
        if spare:
            flat, kernels = (torch.nn.functional.pad(one, (0, spare)) for one in (flat, kernels))
        return (flat @ kernels.T).reshape(n, oh, ow, -1).permute(0, 3, 1, 2)

    def outer(self, x: Tensor, w: Factors, out: Tensor | None = None) -> Tensor:
        """Convolutions with kernels u_r v_r^T (O, C, ...): one channel each, which all O of them are multiples of."""
        if self.transposed or self.groups > 1:
            rows = self.right(x, w.dense())
            return rows if out is None else out.copy_(rows)
        narrow = self(x, w.right).movedim(1, 0).unsqueeze(2)  # (R, B, 1, ...)
        return torch.mul(narrow, w.left.reshape(len(w.left), 1, -1, *(1,) * len(self.stride)), out=out)

    def paired(self, x: Tensor, w: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows == 1:
            return self(x[0], w[0]).unsqueeze(0)
        # one group of channels per row
        y = self(x.movedim(0, 1).flatten(1, 2), w.flatten(0, 1), rows)
        return y.unflatten(1, (rows, -1)).movedim(1, 0)

    def _wide(self, w: Tensor) -> Tensor:
        """Weights (R, ...) side by side along the output channels, group by group."""
        if self.transposed:  # (R, I, O/g, ...) -> (I, R O/g, ...)
            return w.movedim(0, 1).flatten(1, 2)
        return w.unflatten(1, (self.groups, -1)).movedim(0, 1).flatten(0, 2)  # (R, g O/g, ...) -> (g R O/g, ...)

    def _channels_to_rows(self, y: Tensor, rows: int) -> Tensor:
        """Channels (g R O/g) of the axis behind the batch, apart: (..., B, g, R, O/g, ...)."""
        axis = y.ndim - len(self.stride) - 1
        return y.unflatten(axis, (self.groups, rows, -1))


composite(
    aten.conv_tbc,  # (T, B, C), kernels (taps, C, out)
    lambda x, weight, bias, pad=0: torch.conv1d(x.permute(1, 2, 0), weight.permute(2, 1, 0), bias, padding=pad).permute(
        2, 0, 1
    ),
)


@jet_rule(aten.convolution.default, "bilinear")
@jet_rule(aten._convolution.default, "bilinear")
def _convolution(
    pairs: PairSet,
    op: Any,
    x: Any,
    w: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    *flags: bool,
) -> Operand:
    lifted = Convolution(list(stride), list(padding), list(dilation), transposed, list(output_padding), groups)
    unbatched = primal_of(x).ndim == len(stride) + 1
    shape = (-1, *(1,) * len(stride))
    sparse = isinstance(x, SparseOperand) or isinstance(w, SparseOperand)
    if _torch.is_fake(type(primal_of(x))) and not unbatched and isinstance(w, Operand) and not sparse:
        if convolution_kernel.pays(pairs, x, w, stride, padding, dilation, groups, transposed):
            return convolution_kernel.convolution_jet(x, w, bias, stride, padding, dilation)
        jet = joint_product(pairs, lifted, x, w)
        if bias is not None:
            jet = Operand(jet.primal + primal_of(bias).reshape(shape), jet.tangent, jet.second)
        return _with_bias(jet, bias, shape)
    y = op(*primals_of((x, w, bias)), stride, padding, dilation, transposed, output_padding, groups, *flags)
    jet = product(pairs, y, lifted, x, w) if not unbatched else _unbatched(pairs, y, lifted, x, w)
    return _with_bias(jet, bias, shape)


def _with_bias(jet: Operand, bias: Any, shape: tuple[int, ...]) -> Operand:
    """The jet with the rows of the bias added, one number for each channel."""
    if not isinstance(bias, Operand):
        return jet
    parts = [None if r is None else r.reshape(r.shape[0], *shape) for r in (bias.tangent, bias.second)]
    rows = replace(bias, primal=bias.primal.reshape(shape), tangent=parts[0], second=parts[1])
    return _affine(rows, 1, jet, 1)


def _unbatched(pairs: PairSet, y: Tensor, lifted: Convolution, x: Any, w: Any) -> Operand:
    if isinstance(x, Operand):
        tangent, second = (None if r is None else r.unsqueeze(1) for r in (x.tangent, x.second))
        x = replace(x, primal=x.primal.unsqueeze(0), tangent=tangent, second=second)
    else:
        x = x.unsqueeze(0)
    jet = product(pairs, y, lifted, x, w)
    tangent, second = (None if r is None else r.squeeze(1) for r in (jet.tangent, jet.second))
    return replace(jet, primal=y, tangent=tangent, second=second)
